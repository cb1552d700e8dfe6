"""Run by test_triton.py, or by hand: TRITON_INTERPRET=1 pytest tests/moa/interpreted_triton.py

Every comparison is with float64 autograd through `moa.mixing`, of the same rounded inputs.
"""

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from moa import ACTIVATIONS, default_activations, mixing
from moa.kernels import triton_activations, triton_mix

assert triton_mix.INTERPRETED, "set TRITON_INTERPRET=1"

REFERENCE = {
    "type_one": mixing.type_one_mixture,
    "one_sided": mixing.one_sided_mixture,
    "bi_sided": mixing.bi_sided_mixture,
    "quadratic": mixing.quadratic_mixture,
}
KIND = {"type_one": "moa", "one_sided": "one-moa", "bi_sided": "bi-moa", "quadratic": "qd-moa"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def draw(form, N, D, names, dtype=torch.float32, gate_dtype=torch.float32, constant=False, seed=0):
    """Random y, z, pi, rho and grad_h; z and rho are None where the form has none."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, dtype):
        return torch.randn(shape, generator=generator).to(dtype)

    m = len(names)
    rows = () if constant else (N,)
    return {
        "y": normal(N, D, dtype=dtype),
        "z": None if form == "type_one" else normal(N, D, dtype=dtype),
        "pi": normal(*rows, m * (m + 1) // 2 if form == "quadratic" else m, dtype=gate_dtype),
        "rho": normal(*rows, m, dtype=gate_dtype) if form == "bi_sided" else None,
        "grad_h": normal(N, D, dtype=dtype),
    }


def reference(form, names, y, z, pi, rho, grad_h):
    """[h, grad_y, grad_z, grad_pi, grad_rho] in float64."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (y, z, pi, rho)]
    weights = {"pi": leaves[2]} if rho is None else {"pi": leaves[2], "rho": leaves[3]}
    h = REFERENCE[form](leaves[0], leaves[1], weights, names)
    h.backward(grad_h.double())
    return [h.detach(), *(None if t is None else t.grad for t in leaves)]


def check(form, names, y, z, pi, rho, grad_h):
    """Both kernels against the reference. Errors are relative to a tensor's largest element, inputs being about 1."""
    h = triton_mix.forward(form, y, z, pi, rho, names)
    gradients = triton_mix.backward(form, grad_h, y, z, pi, rho, names)
    expected = reference(form, names, y, z, pi, rho, grad_h)
    for name, got, want, source in zip(
        ("h", "grad_y", "grad_z", "grad_pi", "grad_rho"), (h, *gradients), expected, (y, y, z, pi, rho), strict=True
    ):
        if source is None:
            assert got is None, name
            continue
        assert (got.dtype, got.shape) == (source.dtype, source.shape), name
        assert got.is_contiguous(), name
        if got.numel():
            error = (got.double() - want).abs().max() / want.abs().max().clamp(min=1)
            assert error <= max(TOLERANCE[y.dtype], TOLERANCE[source.dtype]), f"{name}: {error}"


@pytest.mark.parametrize("constant", [False, True], ids=["gates", "constants"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("form", REFERENCE)
def test_default_dictionaries(form, dtype, constant):
    names = default_activations(KIND[form])
    check(form, names, **draw(form, 2, 300, names, dtype, gate_dtype=dtype, constant=constant))


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    form=st.sampled_from(list(REFERENCE)),
    order=st.permutations(list(ACTIVATIONS)),
    m=st.integers(1, len(ACTIVATIONS)),
    N=st.integers(0, 3),
    D=st.integers(1, 40) | st.integers(250, 270),
    dtype=st.sampled_from(list(TOLERANCE)),
    gate_dtype=st.sampled_from(list(TOLERANCE)),
    constant=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_dictionary_in_any_order_at_any_size(form, order, m, N, D, dtype, gate_dtype, constant, seed):
    names = order[:m]
    tensors = draw(form, N, D, names, dtype, gate_dtype, constant, seed)
    check(form, names, **tensors)


@pytest.mark.parametrize("form", REFERENCE)
def test_views_of_all_kinds(form):
    names = ["silu", "leaky_relu"]
    N, D, R = 3, 8, 3 if form == "quadratic" else 2
    tensors = draw(form, N, D, names)
    wide = torch.randn(N, 3 * D + 1)
    views = {
        "halves of one projection": {"y": wide[:, :D], "z": wide[:, D : 2 * D]},
        "an odd start": {"y": wide[:, 1 : D + 1]},
        "every second row": {"y": torch.randn(2 * N, D)[::2], "grad_h": torch.randn(2 * N, D)[1::2]},
        "every third channel": {"y": wide[:, : 3 * D : 3], "grad_h": wide[:, 1::3]},
        "transposed": {name: torch.randn(D, N).t() for name in ("y", "z", "grad_h")},
        "the gradient of a sum": {"grad_h": torch.tensor(0.5).expand(N, D)},
        "the gradient of a mean over tokens": {"grad_h": torch.randn(D).expand(N, D)},
        "the gradient of a mean over channels": {"grad_h": torch.randn(N, 1).expand(N, D)},
        "transposed gates": {"pi": torch.randn(R, N).t(), "rho": torch.randn(2, N).t()},
        "every second gate": {"pi": torch.randn(N, 2 * R)[:, ::2], "rho": torch.randn(N, 4)[:, ::2]},
        "the same gates for all": {"pi": torch.randn(R).expand(N, R), "rho": torch.randn(2).expand(N, 2)},
    }
    for view in views.values():
        check(form, names, **tensors | {name: t for name, t in view.items() if tensors[name] is not None})


@pytest.mark.parametrize("form", REFERENCE)
@pytest.mark.parametrize("constant", [False, True], ids=["gates", "constants"])
def test_no_tokens(form, constant):
    names = ["gelu", "relu"]
    tensors = draw(form, 0, 8, names, constant=constant)
    check(form, names, **tensors)
    if constant:
        gradients = triton_mix.backward(form, tensors.pop("grad_h"), *tensors.values(), names)
        assert all(not t.any() for t in gradients if t is not None)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_nan_infinities_and_kinks(name, dtype):
    y = torch.tensor([[float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 30.0, -30.0]], dtype=dtype)
    one = torch.ones(1)
    h = triton_mix.forward("type_one", y, None, one, None, [name])
    slope = triton_mix.backward("type_one", torch.ones_like(y), y, None, one, None, [name])[0]
    want_h, want_slope, *_ = reference("type_one", [name], y, None, one, None, torch.ones_like(y))
    # 2^-7 is an ulp of bfloat16: the interpreter rounds to it towards zero, a GPU to the nearest.
    close = {"rtol": 1e-6 if dtype == torch.float32 else 2**-7, "atol": 1e-9, "equal_nan": True}
    torch.testing.assert_close(h.double(), want_h, **close)
    # The slope of leaky ReLU at a NaN is a number in torch, and another one here.
    torch.testing.assert_close(slope[:, 1:].double(), want_slope[:, 1:], **close)
    assert torch.equal(slope.isnan(), want_slope.isnan())


@pytest.mark.parametrize("form", REFERENCE)
def test_a_nan_stays_in_its_channel_and_in_its_tokens_gates(form):
    names = default_activations(KIND[form])
    tensors = draw(form, 3, 20, names)
    tensors["y"][1, 4] = float("nan")
    gradients = triton_mix.backward(form, tensors.pop("grad_h"), *tensors.values(), names)
    got = [triton_mix.forward(form, *tensors.values(), names), *gradients]
    want = reference(form, names, **tensors, grad_h=torch.ones(3, 20))
    for g, w in zip(got, want, strict=True):
        assert (g is None and w is None) or torch.equal(g.isnan(), w.isnan())


def test_every_activation_of_moa_has_a_kernel_and_others_are_refused():
    assert set(ACTIVATIONS) == triton_activations.SUPPORTED
    with pytest.raises(ValueError, match="no Triton kernel for \\['sine'\\]"):
        triton_mix.forward("type_one", torch.ones(1, 1), None, torch.ones(2), None, ["relu", "sine"])


@triton.jit
def evaluate(t, value, slope, SIZE: tl.constexpr, NAME: tl.constexpr, COARSE: tl.constexpr):
    place = tl.arange(0, SIZE)
    x = tl.load(t + place)
    tl.store(value + place, triton_activations.activation(x, NAME, False, COARSE))
    tl.store(slope + place, triton_activations.derivative(x, NAME, False, COARSE))


@pytest.mark.parametrize("coarse", [False, True], ids=["fine", "coarse"])
@pytest.mark.parametrize("name", sorted(ACTIVATIONS))
def test_an_activation_is_good_to_a_millionth_or_to_an_eighth_of_the_rounding_to_bfloat16(name, coarse):
    tiny = torch.logspace(-18, 0, 1024)
    t = torch.cat([torch.linspace(-30, 30, 2**14 - 2048), tiny, -tiny]).requires_grad_()
    value, slope = torch.empty_like(t), torch.empty_like(t)
    evaluate[(1,)](t, value, slope, SIZE=t.numel(), NAME=name, COARSE=coarse)
    exact = t.detach().double().requires_grad_()
    want = ACTIVATIONS[name](exact)
    (want_slope,) = torch.autograd.grad(want.sum(), exact)
    polynomial = coarse and name == "gelu"
    # Through erf, the lower tail of GELU cancels in float32, also in torch; the polynomial ends where GELU is 1e-7.
    tail = 1e-7 * (t < -1) if name == "gelu" else 0.0
    assert ((value - want).abs() <= (2**-11.9 if polynomial else 2e-6) * want.abs() + tail).all()
    assert ((slope - want_slope).abs() <= (2**-12 if polynomial else 1e-6 * want_slope.abs().clamp(min=1))).all()
