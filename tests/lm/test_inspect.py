"""`lm.inspect` on real runs of two steps: its numbers against the equations, its files read by others."""

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image

from lm import inspect
from lm.data.module import VENDORED
from lm.mixes import model_mixes
from lm.module import LanguageModule
from lm.moe import MoE, MoEConfig
from lm.passage import Piece, pieces, token_names
from lm.text_figure import COLUMNS, MAX_LINES, text_figure, wrap
from lm.text_page import text_page
from lm.tokenizers import load_tokenizer
from moa import FFNConfig
from pretrain.inspection import TABLE, Mix
from pretrain.reload import load_module
from tests.lm.runs import train

TEXT = "<script>1</script>&ï日 $x^2$\nA"  # 32 bytes, one sequence of a run
MOE = ("--model.moe.n_experts=4", "--model.moe.top_k=2")
GATES = {"pi": "u", "rho": "v"}


@pytest.fixture(scope="session")
def run_of(tmp_path_factory):
    """Return the folder of a run of two steps of a kind, trained when first asked for."""
    runs: dict[tuple[str, ...], Path] = {}

    def find(kind: str, *extra: str) -> Path:
        if (kind, *extra) not in runs:
            changes = {"model__ffn__kind": kind, "trainer__max_steps": 2, "trainer__limit_val_batches": 1}
            runs[kind, *extra] = train(tmp_path_factory.mktemp("inspected"), *extra, **changes).folder
        return runs[kind, *extra]

    return find


def look(run: Path, output: Path, *arguments: str) -> str:
    inspect.main(["--checkpoint", str(run), "--output", str(output), *arguments])
    return (output / TABLE).read_text()


def read_table(text: str) -> dict[tuple[str, str], dict[str, dict]]:
    """Return, for each layer and gate, of each activation mean, spread and the names at both ends."""
    found: dict = {}
    for block in text.strip().split("\n\n"):
        heading, *lines = block.splitlines()
        layer, rest = heading.split(", ", 1)
        rows = found.setdefault((layer, rest.split(":")[0]), {})
        label = ""
        for line in (line for line in lines if "mean" not in line):
            words = line.split()
            if "least" in words:
                label, mean, spread, _, *least = words
                rows[label] = {"mean": float(mean), "spread": float(spread), "least": least}
            elif words[0] == "most":
                rows[label]["most"] = words[1:]
    return found


def inputs_of(run: Path, text: str) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """Return the model and what each of its feed-forward layers is given, without the help of hooks."""
    model = load_module(LanguageModule, run)[0].model.requires_grad_(False)
    recorded: list[torch.Tensor] = []

    def recording(forward):
        return lambda x: (recorded.append(x[0]), forward(x))[1]

    for block in model.blocks:
        block.ffn.forward = recording(block.ffn.forward)
    with torch.no_grad():
        model(torch.tensor([list(text.encode())]))
    return model, recorded


@pytest.mark.parametrize("kind", ["moa", "one-moa", "bi-moa", "qd-moa"])
def test_the_table_holds_the_gates_of_the_equations(run_of, tmp_path, kind):
    text = "The state of the union"
    found = read_table(look(run_of(kind), tmp_path / "out", "--text", text, "--top", "3", "--layers", "1"))
    model, inputs = inputs_of(run_of(kind), text)
    names = token_names(pieces(list(text.encode()), load_tokenizer("bytes")))
    layer, x = model.blocks[1].ffn, inputs[1]
    assert found.keys() == {("layer 1", gate) for gate in layer.gate_labels()}
    for (_, gate), rows in found.items():
        weights = 1 / (1 + torch.exp(-x @ getattr(layer, GATES[gate]).weight.T))
        assert list(rows) == layer.gate_labels()[gate]
        for k, row in enumerate(rows.values()):
            assert row["mean"] == pytest.approx(weights[:, k].mean().item(), abs=6e-4)
            assert row["spread"] == pytest.approx(weights[:, k].std(correction=0).item(), abs=6e-4)
            order = sorted(range(len(text)), key=lambda i: weights[i, k].item())
            assert row["least"] == [names[i] for i in order[:3]]
            assert row["most"] == [names[i] for i in order[::-1][:3]]


def test_every_file_is_what_its_name_says(run_of, tmp_path, capsys):
    look(run_of("bi-moa"), tmp_path / "out", "--text", TEXT, "--layers", "1")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {f"{name}_{gate}.png" for name in ("mix", "weights", "curves", "text") for gate in ("pi", "rho")}
    assert names == pictures | {TABLE, "text.html"}
    for name in pictures:
        with Image.open(tmp_path / "out" / name) as image:
            image.verify()
    shown = capsys.readouterr().out
    assert "layer 1, rho: 32 tokens" in shown
    assert "layer 0" not in shown


class Page(HTMLParser):
    """What a browser finds in a page: its elements, and the text of each span."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.spans: list[str] = []
        self.scripts: list[str] = []
        self._within: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self._within.append(tag)
        if tag == "span" and "id" not in dict(attributes):
            self.spans.append("")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag):
        while self._within and self._within.pop() != tag:
            pass

    def handle_data(self, data):
        if self._within and self._within[-1] == "script":
            self.scripts[-1] += data
        elif self._within and self._within[-1] == "span" and self.spans:
            self.spans[-1] += data


def test_the_page_shows_the_text_and_executes_none_of_it(run_of, tmp_path):
    look(run_of("bi-moa"), tmp_path / "out", "--text", TEXT, "--layers", "1")
    html = (tmp_path / "out" / "text.html").read_text()
    page = Page(html)
    assert "".join(page.spans) == TEXT
    assert "日" in page.spans  # three bytes, one piece
    assert not [attributes for _, attributes in page.elements if {"src", "href", "onclick"} & set(attributes)]
    assert "http:" not in html
    assert "https:" not in html
    data, script = page.scripts
    (policy,) = (a["content"] for tag, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"

    layers = json.loads(data)
    assert sorted(layer["name"] for layer in layers) == ["layer 1, π", "layer 1, ρ"]
    model, inputs = inputs_of(run_of("bi-moa"), TEXT)
    weights = torch.sigmoid(inputs[1] @ model.blocks[1].ffn.u.weight.T)
    (layer,) = (layer for layer in layers if layer["name"] == "layer 1, π")
    place = len(TEXT[: TEXT.index("日")].encode())
    piece = page.spans.index("日")
    for k in range(7):
        assert len(layer["weights"][k]) == len(page.spans)
        assert layer["weights"][k][0] == pytest.approx(1000 * weights[0, k].item(), abs=0.6)
        assert layer["weights"][k][piece] == pytest.approx(1000 * weights[place : place + 3, k].mean().item(), abs=0.6)


def test_neither_a_title_nor_a_label_can_leave_its_place():
    mix = Mix("</script><b>", "pi", ["{{script}}"], torch.tensor([[0.5]]))
    page = text_page("<script>{{data}}</script>", pieces([65], load_tokenizer("bytes")), [mix])
    assert len(re.findall("<script", page)) == 2
    assert json.loads(Page(page).scripts[0])[0]["name"] == "</script><b>, π"


def test_a_mixture_of_experts_shows_the_shared_expert_and_each_sparse_one(run_of, tmp_path):
    text = "the union of the states"
    run = run_of("one-moa", *MOE)
    shown = look(run, tmp_path / "out", "--text", text, "--layers", "0")
    table, _, last = shown.strip().rpartition("\n\n")
    heading, columns, *rows = last.splitlines()
    assert heading == "layer 0 experts, pi: mean over the tokens sent to each expert"
    model, inputs = inputs_of(run, text)
    layer, x = model.blocks[0].ffn, inputs[0]

    sent: dict[int, list[torch.Tensor]] = {}  # token by token, expert by expert
    for token in x:
        chosen = sorted(range(4), key=lambda e: -float(layer.router.weight[e] @ token))[:2]
        for expert in chosen:
            sent.setdefault(expert, []).append(torch.sigmoid(layer.experts.u[expert] @ token))
    found = {int(row.split()[1]): row.split()[2:] for row in rows if row.strip().startswith("expert")}
    assert sorted(found) == sorted(sent)
    for expert, gates in sent.items():
        tokens, *means = found[expert]
        assert int(tokens) == len(gates)
        assert [float(mean) for mean in means] == pytest.approx(torch.stack(gates).mean(0).tolist(), abs=6e-4)
    assert columns.split() == ["tokens", *layer.experts.labels["pi"]]

    shared = torch.sigmoid(x @ layer.shared.u.weight.T).mean(0)
    means = [row["mean"] for row in read_table(table)["layer 0 shared", "pi"].values()]
    assert means == pytest.approx(shared.tolist(), abs=6e-4)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"text.html", "curves_pi.png", "experts_curves_pi.png", "layer_0_experts_pi.png"} <= names


@pytest.mark.parametrize("kind", ["moa", "la"])
def test_sparse_experts_alone(kind):
    config = MoEConfig(n_experts=8, top_k=2, n_shared=0, expert_hidden_features=4)
    layer = MoE(config, FFNConfig(kind), 8)
    torch.nn.init.normal_(layer.experts.u if kind == "moa" else layer.experts.alpha)
    x = torch.randn(3, 8)
    mixes, (experts,) = model_mixes({"layer 0": layer}, lambda: layer(x), ["a", "b", "c"])
    assert mixes == []
    if kind == "la":
        torch.testing.assert_close(experts.by_expert().weights, layer.experts.alpha.detach())
        return
    chosen = [token.topk(2).indices.tolist() for token in x @ layer.router.weight.T]
    expected = [
        torch.stack([torch.sigmoid(layer.experts.u[e] @ token) for e in both]).mean(0)
        for token, both in zip(x, chosen, strict=True)
    ]
    torch.testing.assert_close(experts.by_token(["a", "b", "c"]).weights, torch.stack(expected).detach())
    used = sorted({e for both in chosen for e in both})
    assert list(experts.by_expert().names) == [f"expert {e}" for e in used]
    unused = ", ".join(str(e) for e in range(8) if e not in used)
    assert experts.table().endswith(f"no token was sent to experts {unused}")


def test_learnable_activations_have_coefficients_and_curves_but_no_tokens(run_of, tmp_path, capsys):
    run = run_of("qd-la")
    shown = look(run, tmp_path / "out", "--text", "anything")
    assert "qd-la mixes every token alike: the text that was given makes no difference" in capsys.readouterr().out
    alpha = load_module(LanguageModule, run)[0].model.blocks[1].ffn.alpha
    values = [float(line.split()[1]) for line in shown.split("\n\n")[1].splitlines()[1:]]
    assert values == pytest.approx(alpha.tolist(), abs=6e-4)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        TABLE,
        "mix_alpha.png",
        "weights_alpha.png",
        "curves_alpha.png",
    }


def test_without_a_text_it_is_the_run_s_own_and_lies_in_the_run(run_of, capsys):
    run = run_of("moa")
    inspect.main(["--checkpoint", str(run / "checkpoints" / "last.ckpt"), "--layers", "0", "--top", "1"])
    assert f"written to {run}/inspect: {TABLE}, text.html" in capsys.readouterr().out
    spans = Page((run / "inspect" / "text.html").read_text()).spans
    assert len("".join(spans)) == 32
    speeches = [json.loads(line)["text"] for line in VENDORED["demo:val"].read_text().splitlines()]
    assert any(speech.startswith("".join(spans)) for speech in speeches)


def test_a_long_text_is_cut_and_a_file_is_read(run_of, tmp_path, capsys):
    (tmp_path / "long.txt").write_text("word " * 20)
    look(run_of("moa"), tmp_path / "out", "--file", str(tmp_path / "long.txt"), "--layers", "0")
    shown = capsys.readouterr().out
    assert "the text has 100 tokens, of which the first 32 are looked at: the run's sequence length" in shown
    assert "layer 0, pi: 32 tokens" in shown


def test_mistakes_are_told_in_one_line(run_of, tmp_path, capsys):
    moa, precious = run_of("moa"), tmp_path / "precious"
    precious.mkdir()
    (precious / "file").touch()
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    fixed = "kind swiglu, whose activation is fixed: there is no mix to look at; kinds that have one: la, one-la, bi-la"
    for arguments, message in (
        (["--checkpoint", str(tmp_path / "gone")], "gone does not exist"),
        (["--checkpoint", str(run_of("swiglu"))], fixed),
        (["--checkpoint", str(moa), "--text", ""], "--text is empty: give some words"),
        (["--checkpoint", str(moa), "--text", "a", "--file", "b"], "leave one out"),
        (["--checkpoint", str(moa), "--file", str(tmp_path / "gone.txt")], "gone.txt cannot be read: No such file"),
        (["--checkpoint", str(moa), "--file", str(tmp_path / "latin.txt")], "latin.txt is no UTF-8 text (byte 3)"),
        (["--checkpoint", str(moa), "--layers", "2"], "--layers '2' has to be numbers of layers"),
        (["--checkpoint", str(moa), "--top", "0"], "--top is 0: it has to be at least 1"),
        (["--checkpoint", str(moa), "--output", f"{tmp_path}/latin.txt/x"], "latin.txt is no writable folder"),
        (["--checkpoint", str(moa), "--output", str(precious)], "is no earlier inspection"),
    ):
        with pytest.raises(SystemExit) as stop:
            inspect.main(arguments)
        shown = capsys.readouterr().err
        assert stop.value.code == 2
        assert message in shown
        assert shown.count("\n") == 1


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
@pytest.mark.parametrize("text", ["naïve 日本 🦙🦙 e\u0301 end", " two  spaces\n", "日" * 5])
def test_pieces_are_the_whole_text_in_whole_characters(name, text):
    tokenizer = load_tokenizer(name)
    ids = tokenizer.encode(text)
    found = pieces(ids, tokenizer)
    assert "".join(piece.text for piece in found) == text
    assert [piece.start for piece in found] + [len(ids)] == [0] + [piece.stop for piece in found]
    assert len(token_names(found)) == len(ids)


def test_names_show_white_space_and_cannot_steer_a_terminal():
    names = token_names(pieces(list(b"a \x1b[2J\n"), load_tokenizer("bytes")))
    assert names[0] == "⟨a⟩·\\x1b["
    assert names[2] == "a·⟨\\x1b⟩[2J"
    assert names[6] == "[2J⟨↵⟩"
    assert all(name.isprintable() for name in names)


def test_a_character_that_the_cut_has_split_is_shown_as_such():
    ids = list("日本".encode())[:4]
    assert [piece.text for piece in pieces(ids, load_tokenizer("bytes"))] == ["日", "\ufffd"]


def letters(text: str) -> list[Piece]:
    return [Piece(place, place + 1, char) for place, char in enumerate(text)]


def test_each_letter_of_a_picture_has_a_cell_of_its_own_over_its_colour():
    text = "aא日e\u0301😀\x07z"
    weights = torch.tensor([[place / 10] for place in range(len(text))])
    axes = text_figure(letters(text), [Mix("layer 0", "pi", ["silu"], weights)]).axes[0]
    # Hebrew stays where it stands; what DejaVu Sans Mono lacks, or does not print, is a box.
    cells = [("a", 0, 1, 0), ("□", 1, 1, 1), ("□", 2, 2, 2), ("e\u0301", 4, 1, 3), ("□", 5, 2, 5), ("□", 7, 1, 6)]
    cells.append(("z", 8, 1, 7))
    words = axes.texts[1:]
    assert [word.get_text() for word in words] == [shown for shown, *_ in cells]
    assert len({word.get_position()[1] for word in words}) == 1
    for word, shade, (_, column, width, piece) in zip(words, axes.patches, cells, strict=True):
        assert (shade.get_x(), shade.get_width()) == (column, width)
        assert shade.get_alpha() == pytest.approx(0.75 * piece / 7)
        assert word.get_position()[0] == column + (width - 1) / 2


@pytest.mark.parametrize("word", ["state ", "日本語", "日" * 47 + "a ", "a " + "b" * 95 + "日", "x" * 500])
def test_a_picture_that_ends_before_the_text_says_so(word):
    lines = wrap(letters(word * 200))
    assert len(lines) == MAX_LINES
    assert [cell.text for line in lines for cell in line if cell.piece is None] == ["…"]
    assert lines[-1][-1].text == "…"
    for line in lines:
        ends = [cell.column + cell.width for cell in line]
        assert [cell.column for cell in line] == [0, *ends[:-1]]
        assert ends[-1] <= COLUMNS
    shown = "".join(cell.text for line in lines for cell in line)
    assert (word * 200).startswith(shown[:-1])
    assert not any(cell.piece is None for line in wrap(letters("a\n" * MAX_LINES)) for cell in line)
