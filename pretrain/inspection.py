"""How layers use their activations: the weights in one forward pass, their statistics, the function that they make.

A layer is read through its public hooks alone (`gates`, `gate_labels`, `coefficients`, `coefficient_labels`), and what
it is given is recorded from outside, by forward hooks that are gone afterwards. The activations themselves, name ->
elementwise function, are handed in.

Shapes: R rows (tokens or experts), M activations or pairs of them, P points of a curve.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pretrain.atomic import locked, partial_folder, publish, write_durably
from pretrain.checkpoint import find_checkpoint
from pretrain.errors import UserError
from pretrain.paths import output_path

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Activations = Mapping[str, Callable[[Tensor], Tensor]]

TABLE = "mixes.txt"
PIXELS_PER_INCH = 130


@dataclass(frozen=True)
class Mix:
    """The weights by which one layer mixes its activations, for one of its gates.

    Attributes:
        layer: what the layer is called.
        gate: "pi" or "rho"; of learnable activations "alpha" or "beta".
        labels: what each column weighs, as `gate_labels` says: "gelu", or a product "id*gelu", Id(y) * GELU(z).
        weights: (R, M) in float32; of learnable activations (1, M).
        unit: what a row belongs to: "token" or "expert"; "" for constants.
        names: what each row is called; () where nobody asks.
    """

    layer: str
    gate: str
    labels: Sequence[str]
    weights: Tensor
    unit: str = "token"
    names: Sequence[str] = ()

    @property
    def mean(self) -> Tensor:
        """(M,), over the rows."""
        return self.weights.mean(0)

    @property
    def spread(self) -> Tensor:
        """(M,), the standard deviation over the rows: 0 means that the gate ignores its input."""
        return self.weights.std(0, correction=0)

    @property
    def entropy(self) -> float:
        """Of the mix |pi_k| / sum |pi|, the mean over the rows in units of log M: 1 is an even mix."""
        share = self.weights.abs() / self.weights.abs().sum(-1, keepdim=True).clamp_min(1e-12)
        even = math.log(len(self.labels)) or 1.0  # the entropy of an even mix; of a single activation it is 0
        return float(-(share * share.clamp_min(1e-12).log()).sum(-1).mean() / even)

    @property
    def is_of_pairs(self) -> bool:
        return any("*" in label for label in self.labels)

    def means(self) -> dict[str, float]:
        """Each label's mean weight."""
        return dict(zip(self.labels, self.mean.tolist(), strict=True))

    def by_name(self) -> dict[str, dict[str, float]]:
        """Each row's weights, by its name and by label."""
        rows = zip(self.names, self.weights.tolist(), strict=True)
        return {name: dict(zip(self.labels, row, strict=True)) for name, row in rows}

    def metrics(self) -> dict[str, float]:
        """`LABEL/mean` and, unless the weights are constants, `LABEL/spread` and `entropy`."""
        means = {f"{label}/mean": value for label, value in self.means().items()}
        if not self.unit:
            return means
        spreads = zip(self.labels, self.spread.tolist(), strict=True)
        return {**means, **{f"{label}/spread": value for label, value in spreads}, "entropy": self.entropy}

    def ends(self, top: int) -> tuple[Tensor, Tensor]:
        """The rows of least and of most weight for each label, outermost first, each (M, min(top, R))."""
        order = self.weights.argsort(dim=0, stable=True).T
        return order[:, :top], order.flip(1)[:, :top]

    def most_varied(self) -> int:
        """The column whose weights spread most."""
        return int(self.spread.argmax())


def mixing_layers(root: nn.Module) -> dict[str, Any]:
    """Return the layers below a module (itself included) that mix activations, by name."""
    return {
        name: module
        for name, module in root.named_modules()
        if hasattr(module, "gate_labels") and (module.gate_labels() or module.coefficient_labels())
    }


@torch.no_grad()
def layer_inputs(layers: Mapping[str, nn.Module], forward: Callable[[], Any]) -> dict[str, Tensor]:
    """Return what each layer is given during `forward()`, (tokens, d)."""
    inputs: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, args: inputs.__setitem__(name, args[0].detach().flatten(0, -2))

    hooks = [module.register_forward_pre_hook(keep(name)) for name, module in layers.items()]
    try:
        # Compiled blocks would pass over hooks that were added later.
        with torch.compiler.set_stance("force_eager"):
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    return inputs


@torch.no_grad()
def layer_mixes(name: str, layer: Any, x: Tensor | None = None, names: Sequence[str] = ()) -> list[Mix]:
    """Return the mix of each gate of a layer at its input, or of each set of its constants.

    Args:
        name: what the layer is called.
        layer: a module with the hooks.
        x: the layer's input, (tokens, d); constants need none.
        names: what each token is called.
    """
    labels = layer.gate_labels()
    if labels:
        gates = layer.gates(x).items()
        return [Mix(name, gate, labels[gate], weights.float(), names=names) for gate, weights in gates]
    labels = layer.coefficient_labels()
    return [
        Mix(name, gate, labels[gate], values.detach().float()[None], unit="")
        for gate, values in layer.coefficients().items()
    ]


def by_gate(mixes: Sequence[Mix]) -> dict[str, list[Mix]]:
    """Return the mixes of each gate, in their order."""
    gates: dict[str, list[Mix]] = {}
    for mix in mixes:
        gates.setdefault(mix.gate, []).append(mix)
    return gates


def curves(mix: Mix, activations: Activations, y: Tensor, z: float | Tensor = 0.0) -> Tensor:
    """Return the function of every row at the points y: sum_k w_k sigma_k(y), (R, P).

    For pairs it is the slice of sum_{k<=l} w_kl sigma_k(y) sigma_l(z) at one z.
    """
    return mix.weights @ components(mix.labels, activations, y, z).to(mix.weights)


def components(labels: Sequence[str], activations: Activations, y: Tensor, z: float | Tensor = 0.0) -> Tensor:
    """Return what each label stands for at the points y: sigma_k(y), or sigma_k(y) sigma_l(z) for pairs, (M, P)."""
    rows = []
    for label in labels:
        first, _, second = label.partition("*")
        row = activations[first](y)
        rows.append(row * activations[second](torch.as_tensor(z).to(y)) if second else row)
    return torch.stack(rows)


def table(mixes: Sequence[Mix], top: int) -> str:
    """Return all mixes as text: of each activation mean and spread, and the `top` rows at each end."""
    return "\n\n".join(_mix_table(mix, top) for mix in mixes)


def _mix_table(mix: Mix, top: int) -> str:
    width = max(len(label) for label in mix.labels) + 2
    if not mix.unit:
        rows = [f"  {label:<{width}}{value:>7.3f}" for label, value in mix.means().items()]
        return "\n".join([f"{mix.layer}, {mix.gate}: constants", *rows])
    count = len(mix.weights)
    heading = f"{mix.layer}, {mix.gate}: {count:,} {mix.unit}{'s' * (count != 1)}, entropy {mix.entropy:.3f}"
    lines = [heading, f"  {'':<{width}}{'mean':>7}{'spread':>8}"]
    least, most = mix.ends(top)
    cell = max((len(mix.names[row]) for row in {*least.flatten().tolist(), *most.flatten().tolist()}), default=0)
    for label, mean, spread, *ends in zip(mix.labels, mix.mean.tolist(), mix.spread.tolist(), least, most, strict=True):
        low, high = ("  ".join(f"{mix.names[row]:<{cell}}" for row in rows.tolist()).rstrip() for rows in ends)
        lines.append(f"  {label:<{width}}{mean:>7.3f}{spread:>8.3f}  least  {low}")
        lines.append(f"  {'':<{width}}{'':>15}  most   {high}")
    return "\n".join(lines)


def choose_layers(text: str | None, n_layers: int) -> list[int]:
    """Return the layers that "0,3" names; None means all.

    Raises:
        UserError: no number, or no such layer.
    """
    if text is None:
        return list(range(n_layers))
    numbers = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) < n_layers for part in numbers):
        raise UserError(
            f"--layers {text!r} has to be numbers of layers, such as 0,{n_layers - 1}: the run has 0 to {n_layers - 1}"
        )
    return sorted({int(part) for part in numbers})


def check_kind(kind: str, mixing_kinds: Sequence[str], checkpoint: str) -> None:
    """Raise a UserError unless the kind has a mix to look at."""
    if kind not in mixing_kinds:
        raise UserError(
            f"{checkpoint} has feed-forward layers of kind {kind}, whose activation is fixed: there is no mix to look "
            f"at; kinds that have one: {', '.join(mixing_kinds)}"
        )


def check_top(top: int) -> None:
    """Raise a UserError unless at least one row is to be named at each end."""
    if top < 1:
        raise UserError(f"--top is {top}: it has to be at least 1")


def output_folder(checkpoint: str, output: str | None) -> Path:
    """Return where to write: `output`, or the folder `inspect` of the run (for a lone file, beside it).

    Raises:
        UserError: the folder cannot be made, or exists and holds other things than an earlier inspection.
    """
    if output is None:
        home = find_checkpoint(checkpoint).parent
        output = str((home.parent if home.name == "checkpoints" else home) / "inspect")
    folder = output_path(output)
    if folder.exists() and not _is_an_inspection(folder):
        raise UserError(f"{folder} exists and is no earlier inspection: give another --output, or remove it first")
    return folder


def _is_an_inspection(folder: Path) -> bool:
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else ["a file"]
    return not names or (TABLE in names and all(name == TABLE or name.endswith((".png", ".html")) for name in names))


def write_inspection(folder: Path, texts: Mapping[str, str], figures: Mapping[str, "Figure"]) -> None:
    """Write files of text and pictures (their names without .png) as one folder, in the place of an earlier one.

    What was written is told.
    """
    with locked(folder), partial_folder(folder) as partial:
        for name, text in texts.items():
            write_durably(partial / name, text)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # a box stands for it
            for name, figure in figures.items():
                figure.savefig(partial / f"{name}.png", dpi=PIXELS_PER_INCH, facecolor="white")
        publish(partial, folder)
    print(f"written to {folder}: {', '.join([*texts, *(f'{name}.png' for name in figures)])}\n")
