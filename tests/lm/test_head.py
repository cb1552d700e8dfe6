"""The chunked cross-entropy: value and gradients against the plain one, and that it never holds all logits."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lm.data.packing import IGNORED
from lm.head import Head, cross_entropy_sum
from lm.model import Llama, LlamaConfig
from moa import FFNConfig

ROOT = Path(__file__).parent.parent.parent


def problem(n_tokens=37, n_vocab=53, d=16, dtype=torch.float64, ignored=5):
    """Hidden states, a weight and targets, of which every `ignored`-th is none."""
    generator = torch.Generator().manual_seed(n_tokens * n_vocab)
    hidden = torch.randn(n_tokens, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(n_vocab, d, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(n_vocab, (n_tokens,), generator=generator)
    targets[::ignored] = IGNORED
    return hidden, weight, targets


def chunk_bytes(n_tokens: int, n_vocab: int) -> int:
    return 4 * n_vocab * n_tokens


def plain(hidden, weight, targets):
    logits = F.linear(hidden, weight)
    return F.cross_entropy(
        logits if logits.dtype == torch.float64 else logits.float(), targets, ignore_index=IGNORED, reduction="sum"
    )


def assert_same(ours, theirs, inputs, tolerance):
    """Relative to the size of the whole tensor; the loss is scaled, as a mean over a step scales it."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    gradients = [torch.autograd.grad(loss * 0.37, inputs) for loss in (ours, theirs)]
    for tensor, a, b in zip(inputs, *gradients, strict=True):
        assert a.dtype == tensor.dtype
        assert (a - b).norm() <= tolerance * b.norm() + 1e-30


@given(n_tokens=st.integers(1, 40), n_vocab=st.integers(1, 60), chunk=st.integers(1, 45), ignored=st.integers(1, 7))
def test_it_equals_cross_entropy_over_all_logits_wherever_chunks_end(n_tokens, n_vocab, chunk, ignored):
    """`ignored` 1: no token has a target, and the loss and all gradients are 0."""
    hidden, weight, targets = problem(n_tokens, n_vocab, d=5, ignored=ignored)
    ours = cross_entropy_sum(hidden, weight, targets, IGNORED, chunk_bytes(chunk, n_vocab))
    assert_same(ours, plain(hidden, weight, targets), (hidden, weight), 1e-12)


def test_float32_and_no_tokens_at_all():
    hidden, weight, targets = problem(dtype=torch.float32)
    assert_same(cross_entropy_sum(hidden, weight, targets), plain(hidden, weight, targets), (hidden, weight), 1e-6)
    assert cross_entropy_sum(hidden[:0], weight, targets[:0]) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bfloat16_products_leave_the_sum_in_float32(dtype):
    """Under autocast, and with weights of bfloat16 themselves."""
    hidden, weight, targets = problem(200, 300, 64, dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        ours = cross_entropy_sum(hidden, weight, targets, IGNORED, chunk_bytes(30, 300))
        theirs = plain(hidden, weight, targets)
    assert ours.dtype == torch.float32
    assert_same(ours, theirs, (hidden, weight), 2e-2)
    exact = plain(*(tensor.detach().bfloat16().double() for tensor in (hidden, weight)), targets)
    assert ours.item() == pytest.approx(exact.item(), rel=1e-3)


def test_large_logits_stay_finite():
    hidden, weight, targets = problem(dtype=torch.float32)
    ours, theirs = (loss(hidden * 1e4, weight, targets) for loss in (cross_entropy_sum, plain))
    assert_same(ours, theirs, (hidden, weight), 1e-5)


@pytest.mark.parametrize("frozen", [0, 1])
def test_only_the_gradients_that_are_asked_for_are_computed(frozen):
    inputs = problem()
    inputs[frozen].requires_grad_(False)
    ours, theirs = cross_entropy_sum(*inputs), plain(*inputs)
    assert_same(ours, theirs, [inputs[1 - frozen]], 1e-12)
    assert ours.grad_fn.gradients is None  # given away
    assert cross_entropy_sum(*inputs).grad_fn.gradients[frozen] is None


def test_without_gradients_it_is_the_loss_alone():
    hidden, weight, targets = problem()
    with torch.no_grad():
        ours = cross_entropy_sum(hidden, weight, targets)
    assert not ours.requires_grad
    torch.testing.assert_close(ours, plain(hidden, weight, targets).detach())


def test_a_second_backward_is_refused():
    """It would find gradients that the first one has scaled."""
    hidden, weight, targets = problem()
    loss = cross_entropy_sum(hidden, weight, targets)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="compute it anew"):
        loss.backward()


@pytest.mark.parametrize("target", [53, -1])
def test_a_target_outside_the_vocabulary_is_an_error(target):
    hidden, weight, targets = problem()
    targets[1] = target
    with pytest.raises(RuntimeError, match=f"index {target} is out of bounds"):
        cross_entropy_sum(hidden, weight, targets)


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has none before 2.14")
def test_it_agrees_with_torchs_own_chunked_cross_entropy():
    hidden, weight, targets = problem(200, 300, 64, torch.float32)
    theirs = F.linear_cross_entropy(
        hidden,
        weight,
        targets,
        ignore_index=IGNORED,
        reduction="sum",
        options=nn.LinearCrossEntropyOptions(batch_chunk_size=32, chunking_method=None),
    )
    assert_same(cross_entropy_sum(hidden, weight, targets), theirs, (hidden, weight), 1e-6)


def test_a_head_gives_logits_or_their_loss_and_has_the_names_of_a_linear_layer():
    head = Head(16, 53)
    assert list(head.state_dict()) == ["weight"]
    x, targets = torch.randn(2, 7, 16), torch.randint(53, (2, 7))
    logits = head(x)
    torch.testing.assert_close(logits, x @ head.weight.T)
    expected = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    torch.testing.assert_close(head(x, targets), expected)


def test_a_llama_returns_the_loss_of_its_own_logits():
    model = Llama(LlamaConfig(vocab_size=97, d_model=48, n_layers=2, n_heads=4, ffn=FFNConfig("qd-moa")))
    tokens, targets = torch.randint(97, (2, 2, 12))
    targets[:, -3:] = IGNORED
    loss = model(tokens, targets_BL=targets, ignore_index=IGNORED)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    assert_same(loss, expected, list(model.parameters()), 1e-5)


def test_all_logits_are_never_in_memory():
    """8,000 tokens at a vocabulary of 15,000 are 480 MB of logits, which the plain loss holds at least once."""
    script = """
import torch
from benchmarks.head_loss import cross_entropy_sum, peak_resident_bytes, plain
torch.set_num_threads(1)
hidden, weight = torch.randn(8_000, 8, requires_grad=True), torch.randn(15_000, 8, requires_grad=True)
targets = torch.randint(15_000, (8_000,))
for loss in cross_entropy_sum, plain:
    loss(hidden[:8], weight, targets[:8]).backward()
for loss in cross_entropy_sum, plain:
    before = peak_resident_bytes()
    loss(hidden, weight, targets).backward()
    print(peak_resident_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    ours, theirs = (int(line) / (8_000 * 15_000 * 4) for line in done.stdout.split())
    assert ours < 0.35
    assert theirs > 0.9
