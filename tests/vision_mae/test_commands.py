"""Evaluation and export of a trained run."""

import json
import subprocess
import sys

import pytest
import torch
import yaml

from pretrain.errors import UserError
from tests.runs import run_folder
from tests.vision_mae.runs import train
from vision_mae import evaluate, export
from vision_mae.classifier import layer_rules
from vision_mae.encoder import build_encoder
from vision_mae.model import MAEConfig
from vision_mae.probes import accuracies, knn_votes

# A fresh process that knows only timm (and moa where the kind needs it), with the model's arguments in config.json.
FRESH = """
import json, sys, timm, torch
from safetensors.torch import load_file
from timm.layers import Mlp, SwiGLU
folder = sys.argv[1]
description = json.load(open(f"{folder}/config.json"))
name = description["mlp_layer"]
if name.startswith("moa."):
    import moa
    layer = moa.timm_mlp(description["autoencoder"]["ffn"]["kind"], bias=False)
else:
    layer = {"timm.layers.Mlp": Mlp, "timm.layers.SwiGLU": SwiGLU}[name]
    assert "moa" not in sys.modules
model = timm.create_model(description["architecture"], **description["arguments"], mlp_layer=layer).eval()
model.load_state_dict(load_file(f"{folder}/encoder.safetensors"), strict=True)
with torch.no_grad():
    torch.save(model.forward_features(torch.load(f"{folder}/../images.pt")), f"{folder}/../tokens.pt")
"""


def load_in_a_fresh_process(folder, images) -> torch.Tensor:
    torch.save(images, folder.parent / "images.pt")
    subprocess.run([sys.executable, "-c", FRESH, str(folder)], check=True, timeout=120)
    return torch.load(folder.parent / "tokens.pt")


@pytest.mark.parametrize("kind", ["qd-moa", "mlp", "swiglu"])
def test_timm_loads_the_exported_encoder_and_gives_the_same_features(trained, tmp_path, kind):
    run = trained
    if kind != "qd-moa":
        run = train(tmp_path / "runs", model__ffn__kind=kind, trainer__max_steps=2, model__probe__every_n_steps=0)
    export.main(["--checkpoint", str(run.folder), "--output", str(tmp_path / "exported")])
    assert len({path.stat().st_mode for path in (tmp_path / "exported").iterdir()}) == 1  # safetensors as the others
    images = torch.randn(2, 3, 32, 32)
    model = run.module.model.eval()
    with torch.no_grad():
        expected = model.encode(images)
        loaded = load_in_a_fresh_process(tmp_path / "exported", images)
        torch.testing.assert_close(loaded, expected, atol=1e-5, rtol=1e-5)
        again = export.load_encoder(tmp_path / "exported")
        torch.testing.assert_close(again.forward_features(images), expected, atol=1e-5, rtol=1e-5)
        noise = torch.rand(2, 16)
        whole = export.load_autoencoder(tmp_path / "exported")
        torch.testing.assert_close(whole(images, noise)[0], model(images, noise)[0])


def test_an_export_does_not_overwrite(trained, tmp_path):
    with pytest.raises(UserError, match="exists already"):
        export.export(str(trained.folder), str(tmp_path))
    with pytest.raises(UserError, match="no writable folder"):
        export.export(str(trained.folder), str(trained.folder / "config.yaml" / "exported"))


def test_a_run_that_is_not_there(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        export.main(["--checkpoint", str(tmp_path / "gone"), "--output", str(tmp_path / "x")])
    assert stop.value.code == 2
    assert "does not exist" in capsys.readouterr().err
    for incomplete in (["--task", "knn"], ["--checkpoint", "x", "--task", "magic"]):
        with pytest.raises(SystemExit):
            evaluate.main(incomplete)
        assert "--checkpoint and --task (knn, linear, finetune) are needed" in capsys.readouterr().err


def test_neighbours_with_the_run_s_own_pictures(trained, capsys):
    evaluate.main(["--checkpoint", str(trained.folder), "--task", "knn", "--k", "5", "--data.val_fraction", "0.1"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("encoder     accuracy 0.")
    assert lines[1].startswith("raw pixels  accuracy 0.")


def test_votes_are_weighted_by_similarity():
    bank = torch.tensor([[1.0, 0.0], [0.8, 0.6], [0.8, 0.6], [-1.0, 0.0]])
    labels = torch.tensor([0, 1, 1, 2])
    query = torch.tensor([[2.0, 0.0]])
    # Three neighbours: one of similarity 1, two of 0.8. A low temperature lets the nearest win, a high one the two.
    assert knn_votes(query, bank, labels, 3, k=3, temperature=0.07).argmax() == 0
    votes = knn_votes(query, bank, labels, 3, k=3, temperature=10.0)
    assert votes.argmax() == 1
    assert votes[0, 2] == 0
    ratio = torch.exp(torch.tensor(0.2 / 10)) / 2
    torch.testing.assert_close(votes[0, 0] / votes[0, 1], ratio)


def test_accuracy_counts_pictures_not_classes():
    scores = torch.tensor([[7.0, 6, 5, 4, 3, 2, 1]]).expand(4, -1)
    assert accuracies(scores, torch.tensor([0, 0, 4, 5])) == {"accuracy": 0.5, "accuracy_top5": 0.75}


def evaluate_small(task: str, trained, runs_dir, *extra: str) -> dict:
    evaluate.main(
        [
            *("--checkpoint", str(trained.folder), "--task", task, "--runs_dir", str(runs_dir)),
            # The pictures, held-out ones too, are the pre-training run's.
            *("--data.global_batch_size=32", "--data.micro_batch_size=16", "--data.num_workers=0"),
            *("--trainer.enable_progress_bar=false", "--trainer.accelerator=cpu", "--trainer.max_epochs=3"),
            *("--model.schedule.warmup_epochs=1", *extra),
        ]
    )
    return json.loads((run_folder(runs_dir) / "summary.json").read_text())


def test_a_linear_probe_trains_the_head_alone(trained, tmp_path):
    summary = evaluate_small("linear", trained, tmp_path, "--model.optimizer.lr=0.01")
    assert summary["optimizer_groups"][0]["parameters"] == 32 * 9 + 9
    assert 0 <= summary["final"]["val/accuracy"] <= summary["final"]["val/accuracy_top5"] <= 1
    hits = summary["final"]["val/accuracy"] * len(trained.data.val_dataset)
    assert hits == pytest.approx(round(hits), abs=1e-3)  # of every picture once
    before = torch.load(trained.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    after = torch.load(run_folder(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name, weight in before.items():
        if name.startswith("model.encoder."):
            assert torch.equal(after[name], weight), name
    assert after["model.norm.num_batches_tracked"] == summary["step"] * 2
    assert "model.norm.weight" not in after


def test_fine_tuning_starts_from_the_encoder_and_moves_it(trained, tmp_path):
    summary = evaluate_small("finetune", trained, tmp_path, "--model.optimizer.base_lr=1e-3")
    rates = {row["group"]: row["lr"] for row in summary["optimizer_groups"]}
    assert rates["layer 3"] == pytest.approx(1e-3 * 32 / 256)
    assert rates["layer 0"] == pytest.approx(0.75**3 * rates["layer 3"])
    before = torch.load(trained.folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    after = torch.load(run_folder(tmp_path) / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    for name in ("blocks.0.attn.qkv.weight", "patch_embed.proj.weight"):
        change = (after[f"model.{name}"] - before[f"model.encoder.{name}"]).abs().max()
        assert 0 < change < 0.02


def test_every_parameter_of_an_encoder_has_its_layer():
    config = MAEConfig(size=None, width=192, depth=3, heads=3)
    names = [name for name, _ in build_encoder(config, num_classes=5, global_pool="avg").named_parameters()]
    for name in names:
        parameter = torch.empty(2, 2)
        (rule,) = [rule for rule in layer_rules(3, 0.5) if rule.matches(name, parameter)]
        layer = (
            int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 4 if "norm" in name or "head" in name else 0
        )
        assert rule.lr_multiplier == 0.5 ** (4 - layer), name


def test_unlabelled_pictures_cannot_be_classified(trained, tmp_path, capsys):
    from tests.vision_mae.pictures import write_folder

    folder = write_folder(tmp_path / "pictures", classes=())
    for task in ("knn", "linear"):
        with pytest.raises(SystemExit) as stop:
            evaluate.main(["--checkpoint", str(trained.folder), "--task", task, f"--data.source={folder}"])
        assert stop.value.code == 2
        assert "label" in capsys.readouterr().err


def test_evaluation_holds_out_the_pictures_that_pre_training_held_out(trained, tmp_path):
    evaluate_small("linear", trained, tmp_path)
    then, now = (
        yaml.safe_load((folder / "config.yaml").read_text())["data"]
        for folder in (trained.folder, run_folder(tmp_path))
    )
    for name in ("source", "val_source", "val_fraction", "max_bad"):
        assert now[name] == then[name], name


@pytest.mark.parametrize(
    ("task", "option", "message"),
    [
        ("knn", "--k=0", "k at least 1"),
        ("knn", "--temperature=0", "temperature positive"),
        ("knn", "--data.image_size=64", "they have to be equal"),
        ("linear", "--data.in_channels=1", "they have to be equal"),
        ("linear", "--data.micro_batch_size=1", "at least 2"),
        ("finetune", "--model.drop_path=2", "model.drop_path is 2"),
        ("finetune", "--model.label_smoothing=-1", "model.label_smoothing is -1"),
    ],
)
def test_a_mistaken_evaluation_is_one_line_and_leaves_nothing(trained, tmp_path, capfd, task, option, message):
    runs = [] if task == "knn" else [f"--runs_dir={tmp_path}", "--data.num_workers=0", "--trainer.accelerator=cpu"]
    with pytest.raises(SystemExit) as stop:
        evaluate.main(["--checkpoint", str(trained.folder), "--task", task, *runs, option])
    assert stop.value.code == 2
    assert message in capfd.readouterr().err.strip().splitlines()[-1]
    assert not list(tmp_path.iterdir())
