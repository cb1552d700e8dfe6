"""`python -m lm.prepare` as its users call it."""

import subprocess
import sys
from pathlib import Path

import pytest

from lm.data.prepared import open_prepared
from lm.prepare import main

ROOT = Path(__file__).parents[2]
SPEECHES = str(ROOT / "lm" / "assets" / "sotu" / "val.jsonl")


def fails(capsys, *arguments):
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    return said


def test_the_command_prepares_and_says_how_to_go_on(tmp_path):
    output = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-m", "lm.prepare", "--source", SPEECHES, "--output", str(output), "--val_fraction=0.2"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "tokenizer gpt2, 50,257 ids, uint16" in done.stdout
    assert f"python -m lm.fit --data.source {output}" in done.stdout
    split = open_prepared(output)
    assert f"train: {split.n_documents} documents, {split.n_tokens:,} tokens, {split.n_bytes:,} bytes" in done.stdout


def test_what_was_left_out_is_told(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": ""}\nbroken\n')
    main(["--source", str(tmp_path), "--output", str(tmp_path / "out"), "--tokenizer", "bytes", "--max_bad", "1"])
    said = capsys.readouterr().out
    assert "left out: 1 empty documents, 1 bad rows" in said
    assert "a.jsonl:3: not JSON" in said


def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys):
    output = str(tmp_path / "out")
    assert "--sorce" in fails(capsys, "--sorce", SPEECHES, "--output", output)
    assert "source" in fails(capsys, "--output", output)
    assert "max_bad" in fails(capsys, "--source", SPEECHES, "--output", output, "--max_bad", "many")
    assert "no such file" in fails(capsys, "--source", "missing.txt", "--output", output)
    assert "no writable folder" in fails(capsys, "--source", SPEECHES, "--output", f"{__file__}/out")
    assert "val_fraction" in fails(capsys, "--source", SPEECHES, "--output", output, "--val_fraction", "2")
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text"\n')
    assert "bad.jsonl, row 2: not JSON" in fails(capsys, "--source", f"{tmp_path}/bad.jsonl", "--output", output)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_an_existing_output_needs_overwrite(tmp_path, capsys):
    arguments = ["--source", SPEECHES, "--output", str(tmp_path / "out"), "--tokenizer", "bytes"]
    main(arguments)
    assert "exists" in fails(capsys, *arguments)
    main([*arguments, "--overwrite", "--max_tokens", "10"])
    assert open_prepared(tmp_path / "out").n_documents == 1


def test_help_explains_every_option(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for word in ("source", "val_fraction", "max_bad", "shard_tokens", "overwrite", "The folder to make"):
        assert word in said
