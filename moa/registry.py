"""The table of feed-forward kinds: what each one is made of, and how to add one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from moa import mixing
from moa.activations import parse_activations
from moa.gates import find_gate

DEFAULT_GATE = "sigmoid"

Family = Literal["fixed", "la", "moa"]
FAMILIES = ("fixed", "la", "moa")
SLOTS = ("pi", "rho")

Target = TypeVar("Target", bound=Callable[..., Any])


@dataclass(frozen=True)
class Kind:
    """One row of the table; see `register` for the meaning of the fields."""

    name: str
    family: Family
    projections: int
    activations: tuple[str, ...]
    slots: tuple[str, ...]
    pairs: bool
    mixing: mixing.Mixing | None
    layer: type | None

    def find_activations(self, activations: str | Sequence[str] | None) -> tuple[str, ...]:
        """The dictionary of a layer of this kind; None asks for the default one.

        Raises:
            ValueError: an invalid dictionary, or another one than the default for a kind whose activation is fixed.
        """
        if activations is None:
            return self.activations
        mixes = self.family != "fixed"
        names = parse_activations(activations, with_identity=mixes and self.projections == 2)
        if not mixes and names != self.activations:
            takers = ", ".join(kinds("la", "moa"))
            raise ValueError(
                f"activations={activations!r} does not apply to {self.name!r}; kinds that take it: {takers}"
            )
        return names

    def check_gate(self, gate: str = DEFAULT_GATE, gate_bias: bool = False) -> None:
        """Raises ValueError for an unknown gate, or for gate options of a kind that has no gates."""
        find_gate(gate)
        if self.family == "moa" or (gate == DEFAULT_GATE and not gate_bias):
            return
        option = f"gate={gate!r}" if gate != DEFAULT_GATE else f"gate_bias={gate_bias!r}"
        takers = ", ".join(kinds("moa"))
        raise ValueError(f"{option} does not apply to {self.name!r}, which has no gates; kinds that take it: {takers}")

    def labels(self, activations: Sequence[str]) -> dict[str, list[str]]:
        """What each mixing weight weighs: {"pi": ["id", ..]}, or for pairs "id*gelu", which is Id(y) * GELU(z)."""
        names = list(activations)
        if self.pairs:
            names = [f"{activations[k]}*{activations[j]}" for k, j in mixing.pairs(len(activations))]
        return {slot: list(names) for slot in self.slots}


_KINDS: dict[str, Kind] = {}


def register(
    name: str,
    *,
    family: Family,
    projections: int,
    activations: Sequence[str] = (),
    slots: Sequence[str] = ("pi",),
    pairs: bool = False,
) -> Callable[[Target], Target]:
    """Adds a feed-forward kind, after which `build_ffn`, `kinds`, `hidden_features` and the counts know it.

    It decorates the function that makes the kind what it is, `(y, z, weights, activations) -> h`, described in
    `moa.mixing`. The whole of a new kind, here the diagonal of qd-MoA, sum_k pi_k(x) sigma_k(y) * sigma_k(z):

        import torch
        import moa

        @moa.register("diagonal-moa", family="moa", projections=2, activations=("id", "gelu", "silu"))
        def diagonal_mixture(y, z, weights, activations):
            h = torch.zeros_like(y)
            for k, name in enumerate(activations):
                sigma = moa.ACTIVATIONS[name]
                h = h + weights["pi"][..., k, None] * sigma(y) * sigma(z)
            return h

        layer = moa.build_ffn("diagonal-moa", 64, moa.hidden_features("diagonal-moa", 64), gate="tanh")
        assert layer(torch.randn(2, 64)).shape == (2, 64)
        assert sum(p.numel() for p in layer.parameters()) == moa.num_parameters("diagonal-moa", 64, 170)

    A kind with parameters of another sort decorates a subclass of `moa.FeedForward` instead, which adds them in
    `__init__` and `reset_parameters` and uses them in `mix`; its parameters are then counted rather than computed.

        @moa.register("prelu", family="fixed", projections=1)
        class PReLU(moa.FeedForward):
            def __init__(self, *args, device=None, dtype=None, **options):
                super().__init__(*args, device=device, dtype=dtype, **options)
                self.slope = torch.nn.Parameter(torch.empty(1, device=device, dtype=dtype))
                self.reset_parameters()

            def reset_parameters(self, **options):
                super().reset_parameters(**options)
                torch.nn.init.constant_(self.slope, 0.25)

            def mix(self, y, z, weights):
                return torch.nn.functional.prelu(y, self.slope)

    Args:
        name: a name that is not taken.
        family: where the weights of the mixture come from: "fixed" has none, "la" learns constants (`alpha`, `beta`),
            "moa" computes them for each token (gates `u`, `v`).
        projections: 1 for Type-I (y = W1 x, hidden width 4d), 2 for Type-II (also z = W2 x, hidden width int(8d/3)).
        activations: the default dictionary, as names.
        slots: the sets of weights that the mixture reads, ("pi",) or ("pi", "rho"); a fixed kind has none.
        pairs: one weight for each pair k <= l instead of for each activation.

    Raises:
        ValueError: the name is taken, or a field is not one of the above.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a kind needs a name, not {name!r}")
    if name in _KINDS:
        raise ValueError(f"the kind {name!r} is already registered; choose another name")
    if family not in FAMILIES:
        raise ValueError(f"kind {name!r}: unknown family {family!r}; valid families: {', '.join(FAMILIES)}")
    if projections not in (1, 2):
        raise ValueError(f"kind {name!r}: projections must be 1 (Type-I) or 2 (Type-II), not {projections!r}")
    if tuple(slots) not in (SLOTS[:1], SLOTS):
        raise ValueError(f"kind {name!r}: slots must be ('pi',) or ('pi', 'rho'), not {slots!r}")
    names = parse_activations(tuple(activations)) if activations or family != "fixed" else ()

    def add_kind(target: Target) -> Target:
        is_layer = isinstance(target, type)
        if not callable(target):
            raise ValueError(f"kind {name!r}: register decorates a function or a class, not {target!r}")
        if is_layer and not hasattr(target, "mix"):
            raise ValueError(f"kind {name!r}: the class {target.__name__} must derive from moa.FeedForward")
        _KINDS[name] = Kind(
            name=name,
            family=family,
            projections=projections,
            activations=names,
            slots=() if family == "fixed" else tuple(slots),
            pairs=pairs,
            mixing=None if is_layer else target,
            layer=target if isinstance(target, type) else None,
        )
        return target

    return add_kind


def find_kind(name: str) -> Kind:
    """The row of the table called `name`; a ValueError that lists the valid names if there is none."""
    if name not in _KINDS:
        raise ValueError(f"unknown kind {name!r}; valid kinds: {', '.join(_KINDS)}")
    return _KINDS[name]


def kinds(*families: Family) -> list[str]:
    """The names of all kinds, or of those of some families ("fixed", "la", "moa"); registered ones last."""
    return [kind.name for kind in _KINDS.values() if not families or kind.family in families]


def default_activations(kind: str) -> list[str]:
    """The dictionary that `kind` uses when none is given; the one activation of a fixed kind.

    Raises:
        ValueError: an unknown kind.
    """
    return list(find_kind(kind).activations)


def hidden_features(kind: str, in_features: int) -> int:
    """The hidden width that gives every kind the same budget: 4d for Type-I, int(8d/3) for Type-II.

    Raises:
        ValueError: an unknown kind.
    """
    return 8 * in_features // 3 if find_kind(kind).projections == 2 else 4 * in_features


# Equation (1), then (2).
for _name in ("relu", "relu2", "gelu", "silu", "leaky_relu", "tanh"):
    register(_name, family="fixed", projections=1, activations=(_name,))(mixing.type_one)
for _name, _sigma in (("swiglu", "silu"), ("geglu", "gelu"), ("reglu", "relu"), ("bilinear", "id")):
    register(_name, family="fixed", projections=2, activations=(_sigma,))(mixing.type_two)

# The dictionaries that win Table 1: K_F without tanh, which hurts there; all of K_G; K_G's id with the letters "gsr2".
_K_F = ("gelu", "silu", "relu2", "leaky_relu", "relu")
_K_G = ("id", "gelu", "silu", "relu2", "leaky_relu", "tanh", "relu")
_K_QD = ("id", "gelu", "silu", "relu2")

# Equations (3) to (6) with constants, (7) to (10) with gates.
for _family in ("la", "moa"):
    register(_family, family=_family, projections=1, activations=_K_F)(mixing.type_one_mixture)
    register(f"one-{_family}", family=_family, projections=2, activations=_K_G)(mixing.one_sided_mixture)
    register(f"bi-{_family}", family=_family, projections=2, activations=_K_G, slots=SLOTS)(mixing.bi_sided_mixture)
    register(f"qd-{_family}", family=_family, projections=2, activations=_K_QD, pairs=True)(mixing.quadratic_mixture)
