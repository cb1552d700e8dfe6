"""The equations evaluated by loops over tokens, channels and activations, on floats, sharing nothing with moa."""

import math

SIGMA = {
    "id": lambda t: t,
    "gelu": lambda t: t * 0.5 * (1.0 + math.erf(t / math.sqrt(2.0))),
    "silu": lambda t: t / (1.0 + math.exp(-t)),
    "relu2": lambda t: t * t if t > 0.0 else 0.0,
    "leaky_relu": lambda t: t if t > 0.0 else 0.01 * t,
    "tanh": math.tanh,
    "relu": lambda t: max(t, 0.0),
}
TYPE_ONE = ("relu", "relu2", "gelu", "silu", "leaky_relu", "tanh")
TYPE_TWO = {"swiglu": "silu", "geglu": "gelu", "reglu": "relu", "bilinear": "id"}
MIXTURES = ("la", "one-la", "bi-la", "qd-la", "moa", "one-moa", "bi-moa", "qd-moa")
MOA = ("moa", "one-moa", "bi-moa", "qd-moa")
KINDS = (*TYPE_ONE, *TYPE_TWO, *MIXTURES)
DEFAULTS = {
    "la": ["gelu", "silu", "relu2", "leaky_relu", "relu"],
    "one-la": ["id", "gelu", "silu", "relu2", "leaky_relu", "tanh", "relu"],
    "bi-la": ["id", "gelu", "silu", "relu2", "leaky_relu", "tanh", "relu"],
    "qd-la": ["id", "gelu", "silu", "relu2"],
}
DEFAULTS |= {name.replace("la", "moa"): names for name, names in DEFAULTS.items()}


def affine(state, name, x):
    """Rows of `name.weight` times the vector x, plus `name.bias` where there is one."""
    rows = state[f"{name}.weight"].tolist()
    bias = state[f"{name}.bias"].tolist() if f"{name}.bias" in state else [0.0] * len(rows)
    return [sum(w * t for w, t in zip(row, x, strict=True)) + b for row, b in zip(rows, bias, strict=True)]


def phi(gate, logits):
    if gate == "sigmoid":
        return [1.0 / (1.0 + math.exp(-t)) for t in logits]
    if gate == "tanh":
        return [math.tanh(t) for t in logits]
    total = sum(math.exp(t) for t in logits)
    return [math.exp(t) / total for t in logits]


def hidden_channel(kind, y, z, pi, rho, names):
    """One channel of the hidden activation from the scalars y and z."""
    if kind in TYPE_ONE:
        return SIGMA[kind](y)
    if kind in TYPE_TWO:
        return SIGMA[TYPE_TWO[kind]](y) * z
    m = len(names)
    if kind in ("la", "moa"):
        return sum(pi[k] * SIGMA[names[k]](y) for k in range(m))
    if kind.startswith("one"):
        return SIGMA["silu"](y) * sum(pi[k] * SIGMA[names[k]](z) for k in range(m))
    if kind.startswith("bi"):
        left = sum(rho[k] * SIGMA[names[k]](y) for k in range(m))
        return left * sum(pi[k] * SIGMA[names[k]](z) for k in range(m))
    h, row = 0.0, 0
    for k in range(m):
        for j in range(m):
            if k <= j:
                h += pi[row] * SIGMA[names[k]](y) * SIGMA[names[j]](z)
                row += 1
    return h


def feed_forward(kind, state, x, names, gate):
    """One token, a list of d floats, through the layer whose state dict is `state`."""
    two_branches = "w3.weight" in state
    y = affine(state, "w1", x)
    z = affine(state, "w2", x) if two_branches else [0.0] * len(y)
    pi = rho = None
    if kind in MOA:
        pi = phi(gate, affine(state, "u", x))
        rho = phi(gate, affine(state, "v", x)) if kind == "bi-moa" else None
    elif kind in MIXTURES:
        pi = state["alpha"].tolist()
        rho = state["beta"].tolist() if kind == "bi-la" else None
    h = [hidden_channel(kind, y[c], z[c], pi, rho, names) for c in range(len(y))]
    return affine(state, "w3" if two_branches else "w2", h)
