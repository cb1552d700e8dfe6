"""Feed-forward layers that mix activations, by learned constants (LA) or by gates for each token (MoA).

    import moa

    ffn = moa.build_ffn("qd-moa", 768, moa.hidden_features("qd-moa", 768))
    ffn(x)                          # (..., 768) -> (..., 768)
    ffn.gates(x)                    # {"pi": (..., 10)}, named by ffn.gate_labels()
    moa.kinds()                     # every name that build_ffn knows; moa.register adds one
    moa.timm_mlp("qd-moa")          # a class for timm's mlp_layer=
    moa.convert(model, "qd-moa")    # replaces the feed-forward layers of any model, keeping its function

Pure torch. `moa.mixing` is the reference, to be read beside equations (1) to (10) of "More Expressive Feedforward
Layers: Part I. Token-Adaptive Mixing of Activations" (arXiv 2605.26647).
"""

from moa.activations import ACTIVATIONS, LETTERS, parse_activations
from moa.config import FFNConfig
from moa.convert import Conversion, Replacement, convert
from moa.counts import flops_per_token, num_parameters, num_projection_parameters
from moa.ffn import COEFFICIENT_NAMES, GATE_NAMES, FeedForward, build_ffn
from moa.gates import GATES, find_gate
from moa.registry import default_activations, find_kind, hidden_features, kinds, register
from moa.timm_mlp import timm_mlp

__all__ = [
    "ACTIVATIONS",
    "COEFFICIENT_NAMES",
    "GATES",
    "GATE_NAMES",
    "LETTERS",
    "Conversion",
    "FFNConfig",
    "FeedForward",
    "Replacement",
    "build_ffn",
    "convert",
    "default_activations",
    "find_gate",
    "find_kind",
    "flops_per_token",
    "hidden_features",
    "kinds",
    "num_parameters",
    "num_projection_parameters",
    "parse_activations",
    "register",
    "timm_mlp",
]
