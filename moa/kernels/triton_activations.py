"""The activations of `moa.activations` and their derivatives inside a Triton kernel, on float32 values.

Each function is written for itself, and the compiler shares what they share: they are inlined into one kernel, where
equal pure expressions of the same value are merged (one sigmoid for SiLU and its derivative, one comparison for the
ReLUs, and so on; a test counts them). Only the names in the compile-time dictionary produce any code.

Two compile-time flags go along everywhere:

- HARDWARE: use the GPU's own instructions (PTX); False under Triton's interpreter and on other makes of GPU.
- COARSE: the values are bfloat16 outside the kernel, so errors far inside its rounding, 2^-9 of a value, are allowed.
"""

from collections.abc import Sequence

import triton
import triton.language as tl

SUPPORTED = frozenset({"id", "relu", "relu2", "leaky_relu", "silu", "gelu", "tanh"})
"""The names that `activation` and `derivative` know."""


def basis(names: Sequence[str]) -> tuple[str, ...]:
    """The functions that span a dictionary. A mixture needs no leaky ReLU of its own: it is 0.01 id + 0.99 relu."""
    if "leaky_relu" not in names:
        return tuple(names)
    return tuple(dict.fromkeys([*(name for name in names if name != "leaky_relu"), "id", "relu"]))


@triton.constexpr_function
def share(name, basis_name):
    """The coefficient of a function of the basis in an activation, at compile time."""
    if name == "leaky_relu":
        return {"id": 0.01, "relu": 0.99}.get(basis_name, 0.0)
    return 1.0 if name == basis_name else 0.0


@triton.jit
def values(t, NAMES: tl.constexpr, HARDWARE: tl.constexpr, COARSE: tl.constexpr):
    """(sigma_1(t), .., sigma_m(t)), a tuple in the order of NAMES."""
    out = ()
    for k in tl.static_range(len(NAMES)):  # Triton 3.6 takes a name out of its tuple as a str, which is no argument
        out = out + (activation(t, tl.constexpr(NAMES[k]), HARDWARE, COARSE),)
    return out


@triton.jit
def derivatives(t, NAMES: tl.constexpr, HARDWARE: tl.constexpr, COARSE: tl.constexpr):
    """(sigma_1'(t), .., sigma_m'(t)), a tuple in the order of NAMES."""
    out = ()
    for k in tl.static_range(len(NAMES)):
        out = out + (derivative(t, tl.constexpr(NAMES[k]), HARDWARE, COARSE),)
    return out


@triton.jit
def activation(t, NAME: tl.constexpr, HARDWARE: tl.constexpr, COARSE: tl.constexpr):
    """sigma(t), as moa.ACTIVATIONS[NAME] has it, NaN and infinities included."""
    if NAME == "id":
        value = t
    elif NAME == "relu":
        value = _relu(t)
    elif NAME == "relu2":
        value = _relu(t) * _relu(t)
    elif NAME == "leaky_relu":
        value = t * tl.where(t > 0, 1.0, 0.01)
    elif NAME == "silu":
        value = t * _sigmoid(t, HARDWARE)
    elif NAME == "gelu":
        value = t * _normal_cdf(t, HARDWARE, COARSE)
    else:
        tl.static_assert(NAME == "tanh", "an activation without a kernel")
        value = _tanh(t, HARDWARE, COARSE)
    return value


@triton.jit
def derivative(t, NAME: tl.constexpr, HARDWARE: tl.constexpr, COARSE: tl.constexpr):
    """sigma'(t); at a kink the value that torch's autograd has: 0 for ReLU, 0.01 for leaky ReLU."""
    if NAME == "id":
        value = tl.full(t.shape, 1.0, tl.float32)
    elif NAME == "relu":
        value = tl.where(t <= 0, 0.0, 1.0)  # so that a NaN has 1, as in torch
    elif NAME == "relu2":
        value = 2 * _relu(t)
    elif NAME == "leaky_relu":
        value = tl.where(t > 0, 1.0, 0.01)
    elif NAME == "silu":
        sigmoid = _sigmoid(t, HARDWARE)
        value = sigmoid + t * sigmoid * (1 - sigmoid)
    elif NAME == "gelu":
        # (t Phi(t))' = Phi(t) + t phi(t), phi(t) = exp(-t^2 / 2) / sqrt(2 pi) = 2^(-t^2 log2(e)/2 - log2(2 pi)/2)
        density = _exp2(t * t * -0.7213475204 - 1.3257480647, HARDWARE)
        value = _normal_cdf(t, HARDWARE, COARSE) + t * density
    else:
        tl.static_assert(NAME == "tanh", "an activation without a kernel")
        tanh = _tanh(t, HARDWARE, COARSE)
        value = 1 - tanh * tanh
    return value


@triton.jit
def _relu(t):
    return tl.maximum(t, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sigmoid(t, HARDWARE: tl.constexpr):
    # Not through the hardware's tanh, which would be one instruction less: its error of 2^-12 is absolute, and SiLU of
    # a negative number is small. This is good to 1e-6 relative at any dtype.
    return _reciprocal(1 + _exp2(t * -1.4426950409, HARDWARE), HARDWARE)


@triton.jit
def _normal_cdf(t, HARDWARE: tl.constexpr, COARSE: tl.constexpr):
    """Phi(t), the distribution function of the standard normal."""
    if COARSE:
        # log2 Phi(-a) is almost a parabola in a = |t|. This minimax polynomial has it to 4e-4 on [0, 5.5], which is a
        # relative error of 2^-11.9 in Phi, also in the lower tail; beyond 5.5 Phi(-a) < 2e-8, and the polynomial goes
        # on falling to -inf. The erf below takes two and a half times the instructions, and arithmetic, not memory, is
        # what limits these kernels.
        a = tl.abs(t)
        exponent = -0.00023325131 * a + 0.0048697735
        exponent = exponent * a - 0.0445990115
        exponent = exponent * a - 0.4696810842
        exponent = exponent * a - 1.1462607384
        exponent = exponent * a - 1.0003590584
        tail = _exp2(exponent, HARDWARE)
        cdf = tl.where(t > 0, 1 - tail, tail)
    else:
        cdf = 0.5 + 0.5 * tl.erf(t * 0.7071067812)
    return cdf


@triton.jit
def _tanh(t, HARDWARE: tl.constexpr, COARSE: tl.constexpr):
    if HARDWARE and COARSE:
        # The relative error, 2^-11 by NVIDIA's documentation, is a quarter of bfloat16's half ulp. It is twice fp16's,
        # hence COARSE. In the derivative 1 - tanh^2 it stays under what torch's rounding of a saved tanh costs there.
        value = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        a = tl.abs(t)
        decay = _exp2(a * -2.8853900818, HARDWARE)  # exp(-2a)
        large = (1 - decay) * _reciprocal(1 + decay, HARDWARE)
        # Near zero 1 - exp(-2a) cancels; the series to t^9 is good to 1e-8 below 0.25.
        square = t * t
        series = (0.0218694885 * square - 0.0539682540) * square + 0.1333333333
        small = t + t * square * (series * square - 0.3333333333)
        value = tl.where(a < 0.25, small, tl.where(t < 0, -large, large))
    return value


@triton.jit
def _exp2(t, HARDWARE: tl.constexpr):
    if HARDWARE:  # .ftz: results under 2^-126 become zero, which saves the three instructions that would keep them
        value = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        value = tl.exp2(t)
    return value


@triton.jit
def _reciprocal(t, HARDWARE: tl.constexpr):
    if HARDWARE:  # 1 ulp; a division spends six more instructions on divisors beyond 2^126
        value = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [t], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        value = 1 / t
    return value
