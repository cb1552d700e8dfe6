"""Any feed-forward kind as the `mlp_layer` of a timm vision transformer. timm itself is not imported."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from moa.ffn import FeedForward
from moa.fused import check_implementation
from moa.registry import DEFAULT_GATE, find_kind, hidden_features


def timm_mlp(
    kind: str,
    *,
    activations: str | Sequence[str] | None = None,
    gate: str = DEFAULT_GATE,
    gate_bias: bool = False,
    bias: bool | None = None,
    drop: float | None = None,
    implementation: str = "auto",
) -> type[FeedForward]:
    """A class to pass to timm: `VisionTransformer(mlp_layer=moa.timm_mlp("qd-moa"))`.

    timm calls it with keywords, which are treated so:

    - `hidden_features` is meant for a Type-I layer, int(mlp_ratio * d). Type-II kinds take two thirds of it, rounded
      down: the usual mlp_ratio of 4 becomes `moa.hidden_features(kind, d)` = int(8d/3), the same parameter budget.
      None gives `moa.hidden_features(kind, d)`.
    - `bias` and `drop` are timm's `proj_bias` and `proj_drop`, which attention shares; an argument here replaces them.
    - `act_layer` is ignored on purpose: the kind decides the activations.
    - `norm_layer` (timm's `scale_mlp_norm`) is an error: no kind has a norm inside.

    timm's own initialisation applies: it reaches every projection and gate as an `nn.Linear`, in each of its modes.

    Args:
        kind, activations, gate, gate_bias, implementation: as in `build_ffn`.
        bias, drop: None to use what timm passes.

    Raises:
        ValueError: as `build_ffn`.
    """
    row = find_kind(kind)
    row.check_gate(gate, gate_bias)
    names = row.find_activations(activations)
    check_implementation(implementation, kind, row.mixing, names)
    return _timm_class(kind, names, gate, gate_bias, bias, drop, implementation)


@cache
def _timm_class(
    kind: str,
    activations: tuple[str, ...],
    gate: str,
    gate_bias: bool,
    own_bias: bool | None,
    own_drop: float | None,
    implementation: str,
) -> type[FeedForward]:
    arguments = (kind, activations, gate, gate_bias, own_bias, own_drop, implementation)
    row = find_kind(kind)
    base: type[FeedForward] = row.layer or FeedForward

    class TimmMlp(base):  # type: ignore[valid-type, misc]
        def __init__(
            self,
            in_features: int,
            hidden_features: int | None = None,
            out_features: int | None = None,
            act_layer: Any = None,
            norm_layer: Any = None,
            bias: bool = True,
            drop: float = 0.0,
            device: Any = None,
            dtype: torch.dtype | None = None,
        ) -> None:
            if norm_layer is not None:
                raise ValueError(f"norm_layer does not apply to {kind!r}: it has no inner norm (timm's scale_mlp_norm)")
            super().__init__(
                kind,
                in_features,
                _hidden_width(kind, in_features, hidden_features),
                out_features=out_features,
                activations=activations or None,
                gate=gate,
                gate_bias=gate_bias,
                bias=bias if own_bias is None else own_bias,
                drop=drop if own_drop is None else own_drop,
                implementation=implementation,
                device=device,
                dtype=dtype,
            )

        def init_weights(self) -> None:
            # timm initialises each nn.Linear, then calls this on their parent in preference to reset_parameters,
            # which would undo what timm has just done.
            self.reset_coefficients()

        def __reduce__(self) -> tuple[Any, ...]:
            # A class made inside a function cannot be found by its name, so pickling and copying remake it.
            return _empty_instance, arguments, self.__getstate__()

    TimmMlp.__name__ = TimmMlp.__qualname__ = f"TimmMlp[{kind}]"
    return TimmMlp


def _hidden_width(kind: str, in_features: int, timm_width: int | None) -> int:
    if timm_width is None:
        return hidden_features(kind, in_features)
    return 2 * timm_width // 3 if find_kind(kind).projections == 2 else timm_width


def _empty_instance(*arguments: Any) -> FeedForward:
    timm_class = _timm_class(*arguments)
    return timm_class.__new__(timm_class)
