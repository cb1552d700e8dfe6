"""Nothing is fetched but through `datasets` and the hub that it stands on: seen in the code, and at the sockets."""

import ast
import contextlib
import socket
from pathlib import Path

import pytest

import lm.fit
import vision_mae.fit
from tests.lm.runs import arguments as lm_arguments
from tests.vision_mae.runs import arguments as vision_arguments

ROOT = Path(__file__).parents[1]
ROOMS = ("moa", "pretrain", "lm", "vision_mae", "benchmarks")
# Who can open a connection: modules, and names of calls in the libraries that we use.
NETWORK = {"socket", "ssl", "http", "urllib", "urllib3", "requests", "httpx", "aiohttp", "ftplib", "fsspec", "wget"}
FETCHING = {"load_dataset", "hf_hub_download", "snapshot_download", "HfApi", "load_state_dict_from_url", "load_url"}
FETCHING |= {
    "download_url",
    "download_url_to_file",
    "urlopen",
    "urlretrieve",
    "from_pretrained",
    "push_to_hub",
    "hf_hub_url",
}
ALLOWED = {
    "lm/data/documents.py": {"load_dataset"},
    "vision_mae/data/source.py": {"load_dataset"},
    "pretrain/hub.py": {"HfApi"},  # which commit a dataset is at
    "lm/tokenizers.py": {"hf_hub_download"},  # one file, tokenizer.json
}


def fetches(file: Path) -> set[str]:
    """Return what a source file imports or names that could fetch something."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        match node:
            case ast.Import(names=names):
                found |= {alias.name.split(".")[0] for alias in names} & NETWORK
            case ast.ImportFrom(module=module, names=names):
                found |= {str(module).split(".")[0]} & NETWORK | {alias.name for alias in names} & FETCHING
            case ast.Attribute(value=ast.Name(id="torch"), attr="hub"):
                found.add("torch.hub")
            case ast.Attribute(attr=name) | ast.Name(id=name):
                found |= {name} & FETCHING
            case ast.keyword(arg="pretrained", value=value) if ast.unparse(value) != "False":
                found.add("pretrained=")
    return found


def test_only_the_readers_of_hub_names_can_fetch():
    seen = {}
    for room in ROOMS:
        for file in sorted((ROOT / room).rglob("*.py")):
            if names := fetches(file):
                seen[str(file.relative_to(ROOT))] = names
    assert seen == ALLOWED


@pytest.fixture
def no_network(monkeypatch):
    """Every attempt to look up or reach another machine fails, and is noted."""
    tried = []

    def refuse(*arguments, **_):
        tried.append(arguments)
        raise OSError("no network here")

    for name in ("getaddrinfo", "gethostbyname", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    return tried


@pytest.mark.parametrize(
    ("command", "arguments"), [(lm.fit, lm_arguments), (vision_mae.fit, vision_arguments)], ids=["lm", "vision_mae"]
)
def test_a_run_on_local_data_opens_no_connection(no_network, tmp_path, command, arguments):
    with contextlib.suppress(SystemExit):
        command.main(arguments(tmp_path, trainer__max_steps=1, trainer__limit_val_batches=1))
    assert list(tmp_path.glob("*/*/summary.json"))
    assert no_network == []
