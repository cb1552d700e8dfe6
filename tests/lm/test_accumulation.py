"""The loss of a step is a mean over its targets, however the step is cut into micro-batches."""

import lightning as L
import pytest
import torch
import torch.nn.functional as F

from lm.data.packing import IGNORED
from pretrain.checkpoint import find_checkpoint
from tests.lm.runs import train
from tests.runs import logged, state_of


class KeepGradients(L.Callback):
    """Keep what the optimizer is given at the first step."""

    gradients: dict[str, torch.Tensor]

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        if trainer.global_step == 0:
            KeepGradients.gradients = {
                name: parameter.grad.clone() for name, parameter in pl_module.model.named_parameters()
            }


def first_step(runs_dir, text, micro_batch_size: int):
    finished = train(
        runs_dir,
        "--trainer.callbacks+=tests.lm.test_accumulation.KeepGradients",
        data__source=text,
        data__val_fraction=0,
        data__global_batch_size=8,
        data__micro_batch_size=micro_batch_size,
        trainer__max_steps=1,
    )
    return finished, KeepGradients.gradients


@pytest.fixture(scope="module")
def short_text(tmp_path_factory):
    """Eight sequences of 32 tokens, the last one with 9 targets only: a step of 8 always holds it."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(("freedom and unity " * 20)[: 7 * 32 + 9])
    return path


def test_one_times_eight_equals_four_times_two(tmp_path, short_text):
    whole, gradients = first_step(tmp_path / "whole", short_text, micro_batch_size=8)
    assert whole.data.train_dataset.n_targets(7) == 9
    parts, parts_gradients = first_step(tmp_path / "parts", short_text, micro_batch_size=2)
    for name, gradient in gradients.items():
        torch.testing.assert_close(parts_gradients[name], gradient, atol=1e-6, rtol=1e-5)
    losses = [logged(finished.folder)[1]["train/loss"] for finished in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_gradients_and_logged_loss_are_those_of_the_mean_over_all_targets(tmp_path, short_text):
    """Computed anew, in one batch, from the initial weights."""
    finished, gradients = first_step(tmp_path, short_text, micro_batch_size=2)
    L.seed_everything(0, verbose=False)
    model = finished.module.build_model()
    samples = [finished.data.train_dataset[index] for index in range(8)]
    inputs, targets = (torch.stack([sample[name] for sample in samples]) for name in ("inputs", "targets"))
    assert (targets != IGNORED).sum() == 7 * 32 + 9
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=1e-6, rtol=1e-5)
    row = logged(finished.folder)[1]
    assert row["train/loss"] == pytest.approx(loss.item(), abs=1e-6)
    norm = torch.cat([parameter.grad.flatten() for parameter in model.parameters()]).norm()
    assert row["optim/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


def test_a_longer_run_does_not_depend_on_the_cut_either(tmp_path):
    states = []
    for micro in (4, 1):
        folder = train(tmp_path / str(micro), data__micro_batch_size=micro, model__optimizer__lr=1e-3).folder
        states.append(state_of(find_checkpoint(folder))["weights"])
    for name, weight in states[0].items():
        torch.testing.assert_close(weight, states[1][name], atol=2e-5, rtol=1e-3)
