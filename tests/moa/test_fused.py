"""The fused mixture computes what the reference computes, forwards and backwards, and keeps less for the way back."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

import moa
from moa import fused, mixing
from moa.kernels import torch_mix

FUNCTIONS = {form: function for function, form in fused.FORMS.items()}
DEFAULTS = {"type_one": "moa", "one_sided": "one-moa", "bi_sided": "bi-moa", "quadratic": "qd-moa"}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-2}


def make_inputs(form, names, dtype=torch.float64, *, tokens=(3, 5), channels=17, constants=False, seed=0):
    """y, z, pi, rho as `moa.mixing` wants them; what a form does not have is None."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(mixing.pairs(len(names))) if form == "quadratic" else len(names)
    lead = () if constants else tokens

    def draw(*shape):
        return (2 * torch.randn(*shape, generator=generator)).to(dtype)

    return (
        draw(*tokens, channels),
        None if form == "type_one" else draw(*tokens, channels),
        draw(*lead, rows),
        draw(*lead, rows) if form == "bi_sided" else None,
    )


def run(function, inputs, g):
    """The output and the gradient of every input that is there."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in inputs]
    h = function(*leaves)
    there = [leaf for leaf in leaves if leaf is not None]
    return h, *torch.autograd.grad(h, there, g)


def reference_of(form, names):
    def function(y, z, pi, rho):
        return FUNCTIONS[form](y, z, {"pi": pi} | ({} if rho is None else {"rho": rho}), names)

    return function


def fused_of(form, names, implementation="torch"):
    return functools.partial(fused.mix, form, activations=names, implementation=implementation)


def check(form, names, inputs, implementation="torch", function=None):
    """Compares with the reference in float64 on the same rounded inputs, relative to the largest entry."""
    exact = [None if t is None else t.double() for t in inputs]
    g = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1)).to(inputs[0].dtype)
    expected = run(reference_of(form, names), exact, g.double())
    found = run(function or fused_of(form, names, implementation), inputs, g)
    for want, got in zip(expected, found, strict=True):
        assert got.dtype == inputs[0].dtype
        assert got.shape == want.shape
        atol = TOLERANCE[inputs[0].dtype] * max(1.0, want.abs().max().item() if want.numel() else 0)
        torch.testing.assert_close(got.double(), want, rtol=0, atol=atol)


dictionaries = st.lists(st.sampled_from(list(moa.ACTIVATIONS)), min_size=1, max_size=7, unique=True)


@settings(max_examples=60, deadline=None)
@given(
    form=st.sampled_from(list(FUNCTIONS)),
    names=dictionaries,
    dtype=st.sampled_from(list(TOLERANCE)),
    tokens=st.sampled_from([(1,), (7,), (2, 3), (0,), (2, 0)]),
    channels=st.sampled_from([1, 2, 31, 64]),
    constants=st.booleans(),
    rows_in_block=st.sampled_from([1, 2, 1000]),
)
def test_any_dictionary_size_type_and_cut_into_blocks(form, names, dtype, tokens, channels, constants, rows_in_block):
    inputs = make_inputs(form, names, dtype, tokens=tokens, channels=channels, constants=constants)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_mix, "BLOCK_BYTES", rows_in_block * 4 * channels)
        patch.setattr(torch, "get_num_threads", lambda: 1)
        check(form, names, inputs)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_strides_of_any_kind(form):
    names = moa.default_activations(DEFAULTS[form])
    y, z, pi, rho = make_inputs(form, names, tokens=(6,))
    wide = torch.cat([y, y if z is None else z, pi], dim=-1)
    y, pi = wide[:, :17], wide[:, 34:]
    z = None if z is None else z.T.contiguous().T
    function = fused_of(form, names)
    check(form, names, (y, z, pi, rho))
    # The gradient of a plain sum has stride 0.
    expected = run(lambda *inputs: reference_of(form, names)(*inputs).sum(), (y, z, pi, rho), None)
    found = run(lambda *inputs: function(*inputs).sum(), (y, z, pi, rho), None)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_gates_may_be_shared_by_the_tokens_of_a_row_and_have_a_wider_type(form):
    names = ("id", "tanh")
    y, z, pi, rho = make_inputs(form, names, torch.float64)
    pi, rho = pi[:, :1], None if rho is None else rho[:1]
    check(form, names, (y, z, pi, rho))
    narrow_y, narrow_z = (None if t is None else t.bfloat16() for t in (y, z))
    float_pi, float_rho = (None if t is None else t.float() for t in (pi, rho))
    inputs = (narrow_y, narrow_z, float_pi, float_rho)
    h, *_, grad = run(fused_of(form, names), inputs, torch.ones_like(narrow_y))
    assert (h.dtype, grad.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("form", FUNCTIONS)
def test_compiled_into_one_loop_it_is_the_same(form):
    names = moa.default_activations(DEFAULTS[form])
    check(form, names, make_inputs(form, names, torch.float32, tokens=(9,), channels=37), "inductor")
    check(form, names, make_inputs(form, names, torch.float32, tokens=(0,), channels=37), "inductor")
    constant = make_inputs(form, names, torch.bfloat16, tokens=(2, 5), channels=40, constants=True)
    check(form, names, constant, "inductor")


@pytest.mark.parametrize("form", FUNCTIONS)
def test_the_operation_keeps_the_rules_of_torch_library(form):
    names = moa.default_activations(DEFAULTS[form])
    inputs = [None if t is None else t.requires_grad_() for t in make_inputs(form, names, tokens=(4,))]
    torch.library.opcheck(torch.ops.moa.mix.default, (*inputs, form, " ".join(names), "torch"))


USES = {
    "returned": lambda h, w: h,
    "once": lambda h, w: h @ w,
    "summed": lambda h, w: h.sum(),
    "twice": lambda h, w: (h + h) @ w + h,
    "beside another reader of its gradient": lambda h, w: (h + w.sum(0)) @ w,
    "beside one of all its gradient": lambda h, w: h + h.detach() * w.sum(0),
    "transposed": lambda h, w: (w @ h.mT).mT,
    "cut": lambda h, w: h[:, ::2].square(),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("use", USES)
def test_no_tensor_of_a_user_is_written_over(use, compiled):
    names = ("id", "tanh")
    inputs = make_inputs("one_sided", names, torch.float64, tokens=(6,), channels=8)
    w, more = torch.randn(2, 8, 8, dtype=torch.float64).unbind()

    def step(function, y, z, pi):
        x = y + more[:6]  # another one who waits for a gradient of the mixture's shape
        h = function(y, z, pi, None)
        return USES[use](h, w) + (x if use != "cut" else 0)

    def checked(step):
        leaves = [t.clone().requires_grad_() for t in inputs[:3]]
        out = step(*leaves)
        upstream = torch.cos(torch.arange(out.numel(), dtype=out.dtype)).view_as(out)
        held = [t.detach().clone() for t in (upstream, *leaves)]
        gradients = torch.autograd.grad(out, leaves, upstream)
        for before, after in zip(held, (upstream, *leaves), strict=True):
            assert torch.equal(before, after)
        return out, *gradients

    expected = checked(functools.partial(step, reference_of("one_sided", names)))
    fused_step = functools.partial(step, fused_of("one_sided", names, "inductor"))
    found = checked(torch.compile(fused_step) if compiled else fused_step)
    torch.compiler.reset()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_compiled_and_recomputed_in_a_checkpoint_the_gradients_stay():
    plain, layer, x = twins("bi-moa")
    step = torch.compile(lambda x: x + checkpoint(layer, x, use_reentrant=False), fullgraph=True)
    compare(outcome(lambda x: x + plain(x), x, cast=False, of=plain), outcome(step, x, cast=False, of=layer), 1e-5)
    torch.compiler.reset()


@pytest.mark.parametrize("kind", ["moa", "one-moa", "bi-moa", "qd-moa", "qd-la"])
def test_under_autocast_a_layer_agrees_with_its_reference(kind):
    plain, layer, x = twins(kind)
    compare(outcome(plain, x, cast=True), outcome(layer, x, cast=True), 2e-2)


def test_under_compile_and_autocast_a_layer_agrees_with_its_reference():
    plain, layer, x = twins("bi-moa")
    layer.compile(fullgraph=True)
    compare(outcome(plain, x, cast=False), outcome(layer, x, cast=False), 1e-5)
    compare(outcome(plain, x, cast=True), outcome(layer, x, cast=True), 2e-2)
    torch.compiler.reset()


def twins(kind):
    """The same layer computed by the reference and by what `auto` takes, and an input."""
    torch.manual_seed(0)
    plain, layer = (moa.build_ffn(kind, 16, 40, implementation=name) for name in ("reference", "auto"))
    layer.load_state_dict(plain.state_dict())
    return plain, layer, torch.randn(2, 6, 16)


def outcome(function, x, cast, of=None):
    """The output of a layer, or of a function around one, and the gradient of every parameter."""
    layer = of or function
    layer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = function(x)
    out.float().square().sum().backward()
    return [out, *(p.grad for p in layer.parameters())]


def compare(expected, found, tolerance):
    for want, got in zip(expected, found, strict=True):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=0, atol=tolerance * max(1.0, want.abs().max().item()))


def kept_bytes(layer, x):
    """Bytes of the storages that autograd keeps for the backward pass, parameters apart, each counted once."""
    kept, owned = {}, {p.untyped_storage().data_ptr() for p in layer.parameters()}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor  # held, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x)
    return sum(t.untyped_storage().nbytes() for address, t in kept.items() if address not in owned)


@pytest.mark.parametrize("kind", [kind for kind in moa.kinds() if moa.find_kind(kind).family != "fixed"])
def test_a_layer_keeps_no_more_for_its_backward_pass_than_swiglu_and_the_gates(kind):
    d, tokens = 48, 64
    x = torch.randn(tokens, d)
    baseline = kept_bytes(moa.build_ffn("swiglu", d, moa.hidden_features("swiglu", d)), x)
    layer = moa.build_ffn(kind, d, moa.hidden_features(kind, d))
    gates = sum(gate.nbytes for gate in layer.gates(x).values())
    assert kept_bytes(layer, x) <= baseline + gates
    plain = moa.build_ffn(kind, d, moa.hidden_features(kind, d), implementation="reference")
    assert kept_bytes(plain, x) > 2 * baseline


def test_recomputed_in_a_checkpoint_the_gradients_stay():
    torch.manual_seed(0)
    layer, x = moa.build_ffn("bi-moa", 8, 24).double(), torch.randn(5, 8, dtype=torch.float64)
    layer(x).square().sum().backward()
    expected = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    torch.testing.assert_close([p.grad for p in layer.parameters()], expected, rtol=0, atol=0)


def test_what_has_no_fused_form_goes_to_the_reference(monkeypatch):
    monkeypatch.setitem(moa.ACTIVATIONS, "cube", lambda t: t**3)
    layer, x = moa.build_ffn("moa", 4, 8, activations=["cube", "relu"]), torch.randn(3, 4)
    y, pi = layer.w1(x), layer.gates(x)["pi"]
    torch.testing.assert_close(layer(x), layer.w2(pi[:, :1] * y**3 + pi[:, 1:] * y.relu()))
    with pytest.raises(ValueError, match="'torch' does not know the activation 'cube'"):
        moa.build_ffn("moa", 4, 8, activations=["cube", "relu"], implementation="torch")
    with pytest.raises(ValueError, match="'inductor' does not apply to 'swiglu'"):
        moa.build_ffn("swiglu", 4, 8, implementation="inductor")
    with pytest.raises(ValueError, match="valid implementations: auto, reference, torch, inductor, triton"):
        moa.build_ffn("moa", 4, 8, implementation="cuda")
    with pytest.raises(ValueError, match="'triton' does not apply to 'geglu'"):
        moa.timm_mlp("geglu", implementation="triton")


@pytest.mark.parametrize("kind", ["moa", "bi-la"])
def test_under_the_transforms_of_torch_func_it_is_the_reference(kind):
    torch.manual_seed(0)
    layer = moa.build_ffn(kind, 3, 5).double()
    x = torch.randn(3, dtype=torch.float64)
    forwards, backwards = torch.func.jacfwd(layer)(x), torch.func.jacrev(layer)(x)
    torch.testing.assert_close(forwards, backwards)
    torch.testing.assert_close(forwards, torch.autograd.functional.jacobian(layer, x))
    torch.testing.assert_close(torch.func.vmap(layer)(x.expand(4, 3)), layer(x.expand(4, 3)))
    forced = moa.build_ffn(kind, 3, 5, implementation="torch").double()
    with pytest.raises(ValueError, match=r"'torch' does not know torch\.func: use 'auto' or 'reference'"):
        torch.func.jacfwd(forced)(x)


def test_a_second_derivative_names_its_cure():
    layer, x = moa.build_ffn("one-moa", 3, 5), torch.randn(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="build the layer with implementation='reference'"):
        gradient.square().sum().backward()


def test_triton_without_a_gpu_is_refused_at_once():
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    with pytest.raises(ValueError, match="'triton' needs a CUDA device and the package triton"):
        moa.build_ffn("moa", 3, 5, implementation="triton")


def test_an_activation_that_a_user_has_replaced_is_theirs(monkeypatch):
    monkeypatch.setitem(moa.ACTIVATIONS, "gelu", lambda t: 3 * t)
    layer, x = moa.build_ffn("la", 3, 5, activations=["gelu"]), torch.randn(2, 3)
    torch.testing.assert_close(layer(x), layer.w2(0.5 * 3 * layer.w1(x)))


@pytest.mark.parametrize("t", [1e-6, 1e8, -1e8])
@pytest.mark.parametrize("name", list(moa.ACTIVATIONS))
def test_values_and_slopes_are_right_where_they_could_cancel(name, t):
    y, pi = torch.full((1, 4), t), torch.ones(1, 1)
    expected, found = (
        run(lambda y, pi, compute=compute: compute(y, None, pi, None), (y, pi), torch.ones_like(y))
        for compute in (reference_of("type_one", [name]), fused_of("type_one", [name]))
    )
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)


def test_a_coefficient_of_one_gives_the_fixed_layer_to_the_last_bit():
    x = torch.randn(7, 12)
    for fixed, kind, name in (("gelu", "la", "gelu"), ("silu", "la", "silu"), ("swiglu", "one-la", "id")):
        plain, layer = moa.build_ffn(fixed, 12, 40), moa.build_ffn(kind, 12, 40)
        layer.load_state_dict(plain.state_dict(), strict=False)
        one_hot = torch.tensor([float(label == name) for label in layer.coefficient_labels()["alpha"]])
        layer.alpha.data.copy_(one_hot)
        assert torch.equal(layer(x), plain(x))
