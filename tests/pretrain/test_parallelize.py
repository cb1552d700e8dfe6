"""Activation checkpointing changes what is held and what is computed twice, and nothing else."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from lm.model import Block, Llama, LlamaConfig
from lm.moe import MoEConfig
from moa import FFNConfig
from pretrain.parallelize import parallelize
from vision_mae.model import MAEConfig, MaskedAutoencoder, ViTFFNConfig
from vision_mae.module import MaskedAutoencoderModule

MODES = ["none", "full", "selective"]


class Noisy(nn.Module):
    """A block that draws random numbers: its recomputation has to draw the same."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.5))


def llama(mode: str, compiled: bool = False, **changes) -> Llama:
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "d_model": 32, "n_layers": 2, "n_heads": 2, "ffn": FFNConfig("qd-moa")}
    model = Llama(LlamaConfig(**sizes | changes))
    parallelize(model, Block, compiled=compiled, activation_checkpointing=mode)
    return model


TOKENS = torch.randint(31, (2, 24), generator=torch.Generator().manual_seed(0))


def gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    loss(model).backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_same_gradients(build: Callable[[str], nn.Module], loss: Callable[[nn.Module], Tensor]) -> None:
    expected = gradients(build("none"), loss)
    for mode in MODES[1:]:
        for ours, theirs in zip(gradients(build(mode), loss), expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def llama_loss(model: nn.Module) -> Tensor:
    return model(TOKENS, targets_BL=TOKENS)


def test_gradients_are_those_without():
    assert_same_gradients(llama, llama_loss)


@pytest.mark.slow
def test_gradients_are_those_without_when_compiled():
    sizes = {"n_layers": 1, "ffn": FFNConfig("swiglu")}
    assert_same_gradients(lambda mode: llama(mode, compiled=True, **sizes), llama_loss)


def test_random_numbers_are_drawn_the_same_twice():
    def build(mode: str) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(Noisy(), Noisy())
        parallelize(model, Noisy, activation_checkpointing=mode)
        return model

    def loss(model: nn.Module) -> Tensor:
        torch.manual_seed(1)
        return model(torch.randn(5, 8)).square().sum()

    assert_same_gradients(build, loss)


class Allocations(TorchDispatchMode):
    """Remembers every result, to see which of them are still held later, by whomever."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self.results[StorageWeakRef(storage)] = storage.nbytes()
        return out

    def held(self) -> int:
        return sum(size for reference, size in self.results.items() if not reference.expired())


def test_less_is_held_for_the_backward():
    held = {}
    for mode in MODES:
        model = llama(mode)
        with Allocations() as allocations:
            loss = llama_loss(model)
        held[mode] = allocations.held()
        assert loss.requires_grad
    assert held["full"] < held["selective"] < 0.9 * held["none"]


def test_selective_repeats_no_matrix_product_and_full_all_of_the_blocks():
    flops = {}
    for mode in MODES:
        model = llama(mode)
        with FlopCounterMode(display=False) as counter:
            llama_loss(model).backward()
        flops[mode] = counter.get_total_flops()
    assert flops["selective"] == flops["none"] < flops["full"]


@pytest.mark.parametrize("mode", MODES[1:])
def test_names_and_class_stay_and_a_copy_is_a_model_of_its_own(mode):
    model = llama(mode)
    assert model.state_dict().keys() == llama("none").state_dict().keys()
    assert all(isinstance(block, Block) for block in model.blocks)
    assert type(model.blocks[0]) is type(model.blocks[1])  # one class, one compilation
    twin = copy.deepcopy(model)
    assert len(gradients(twin, llama_loss)) == len(list(twin.parameters()))
    assert not gradients(model.requires_grad_(False), lambda model: torch.zeros((), requires_grad=True))
    with torch.no_grad():
        assert twin(TOKENS).isfinite().all()


def test_experts_are_not_counted_twice():
    def build(mode: str) -> nn.Module:
        return llama(mode, moe=MoEConfig(n_experts=4, top_k=2))

    def loss(model: nn.Module) -> Tensor:
        value, routing = model(TOKENS, targets_BL=TOKENS, with_routing=True)
        assert routing.load.sum(1).tolist() == [2 * TOKENS.numel()] * 2
        return value + routing.balance_loss.sum() + routing.z_loss.sum()

    assert_same_gradients(build, loss)


def test_a_masked_autoencoder_has_the_setting_too():
    size = {"width": 16, "depth": 2, "heads": 2, "decoder_width": 16, "decoder_depth": 1, "decoder_heads": 2}
    config = MAEConfig(size=None, image_size=32, patch_size=8, ffn=ViTFFNConfig("qd-moa"), **size)
    images, noise = torch.randn(2, 3, 32, 32), torch.rand(2, 16)

    def build(mode: str) -> nn.Module:
        torch.manual_seed(0)
        model = MaskedAutoencoder(config)
        parallelize(model, MaskedAutoencoderModule.block_class, activation_checkpointing=mode)
        return model

    assert_same_gradients(build, lambda model: model(images, noise)[0].square().sum())


def test_another_word_is_told_in_one_line():
    with pytest.raises(ValueError, match=r"model.activation_checkpointing 'some' is unknown: choose one of none, full"):
        parallelize(nn.Linear(1, 1), None, activation_checkpointing="some")
