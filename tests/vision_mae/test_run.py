"""What a run leaves, and what the command line says of mistakes."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pretrain.callbacks import find_callback
from tests.vision_mae.pictures import write_folder
from tests.vision_mae.runs import arguments, train
from vision_mae.callbacks import KnnProbe
from vision_mae.patches import patch_targets


@pytest.fixture(scope="module")
def events(trained) -> EventAccumulator:
    accumulator = EventAccumulator(str(trained.folder), size_guidance={"images": 0})
    accumulator.Reload()
    return accumulator


def test_tensorboard_has_what_a_person_looks_for(events):
    scalars = set(events.Tags()["scalars"])
    expected = {
        "train/loss",
        "val/loss",
        "val/relative_loss",
        "optim/lr",
        "optim/grad_norm",
        "perf/images_per_second",
        "perf/mfu",
        "probe/knn",
        "probe/knn_top5",
        "gates/encoder.blocks.0.mlp/pi/id*gelu/mean",
        "gates/decoder.blocks.0.mlp/pi/entropy",
    }
    assert expected <= scalars
    assert {"reconstruction", "gates/pi"} <= set(events.Tags()["images"])


def test_values_stand_at_the_optimizer_step_that_made_them(events):
    assert [event.step for event in events.Scalars("probe/knn")] == [10, 20]
    assert [event.step for event in events.Scalars("val/loss")] == [10, 20]
    assert [event.step for event in events.Images("reconstruction")] == [10, 20]
    assert [event.step for event in events.Scalars("train/loss")] == [5, 10, 15, 20]


def test_the_loss_falls(events):
    first, last = (event.value for event in events.Scalars("val/relative_loss"))
    assert last < first < 1.2


def test_the_relative_loss_is_that_over_predicting_each_patch_s_mean(trained):
    """The masked patches of the validation pictures, once more by hand."""
    squares = []
    for index in range(len(trained.data.val_dataset)):
        sample = trained.data.val_dataset[index]
        masked = sample["noise"].argsort()[4:]
        targets = patch_targets(sample["images"][None], 8, normalise=True)[0]
        squares.append(targets[masked].square().mean())
    metrics = trained.trainer.callback_metrics
    expected = float(metrics["val/loss"]) / float(torch.stack(squares).mean())
    assert float(metrics["val/relative_loss"]) == pytest.approx(expected, rel=1e-5)


def test_the_summary_counts_pictures_and_parameters(trained):
    summary = json.loads((trained.folder / "summary.json").read_text())
    assert summary["exit_state"] == "finished"
    assert summary["images_seen"] == 20 * 8
    assert summary["parameters"]["total"] == sum(p.numel() for p in trained.module.model.parameters())
    assert summary["final"]["val/loss"] == float(trained.trainer.callback_metrics["val/loss"])


def test_the_online_probe_is_the_command_s(trained):
    """A brute-force vote over all pictures, on the features of the trained model."""
    model, data = trained.module.model.eval(), trained.data
    sets = []
    for dataset in (data.train_dataset, data.val_dataset):
        samples = [dataset[i] for i in range(len(dataset))]
        with torch.no_grad():
            tokens = model.encode(torch.stack([sample["images"] for sample in samples]))[:, 1:].mean(1).double()
        sets.append(((tokens / tokens.norm(dim=1, keepdim=True)).numpy(), [sample["label"] for sample in samples]))
    (bank, bank_labels), (queries, labels) = sets
    right = 0
    for query, label in zip(queries, labels, strict=True):
        similarities = bank @ query
        votes = np.zeros(9)
        for neighbour in np.argsort(-similarities)[:20]:
            votes[bank_labels[neighbour]] += np.exp(similarities[neighbour] / 0.07)
        right += votes.argmax() == label
    assert find_callback(trained.trainer, KnnProbe).latest["probe/knn"] == pytest.approx(right / len(labels), abs=0.04)


def test_pictures_without_labels_are_trained_without_a_probe(tmp_path):
    folder = write_folder(tmp_path / "pictures", n_images=10, classes=())
    finished = train(tmp_path, data__source=folder, trainer__max_steps=2, model__probe__every_n_steps=1)
    assert find_callback(finished.trainer, KnnProbe).latest == {}


@pytest.mark.slow
def test_a_picture_that_breaks_while_training_is_named(tmp_path):
    """More pictures than are looked at ahead; the broken one is met by a loader process."""
    folder = write_folder(tmp_path / "pictures", n_images=80, classes=())
    names = sorted(folder.glob("*.png"))
    looked_at = set(np.linspace(0, 79, 64, dtype=int))
    broken = next(index for index in range(80) if index not in looked_at)
    names[broken].write_bytes(b"broken")
    options = {"data__source": folder, "data__val_fraction": 0, "data__num_workers": 1, "trainer__max_steps": 10}
    command = [sys.executable, "-m", "vision_mae.fit", *arguments(tmp_path, **options)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert ended.stderr.strip().splitlines()[-1].startswith(f"error: {names[broken]}: not a picture")
    summary = json.loads(next(tmp_path.glob("small/*/summary.json")).read_text())
    assert summary["exit_state"] == "failed"
    finished = train(tmp_path / "again", **options, data__max_bad=1)
    assert finished.data.bad.seen == {f"{names[broken]}: not a picture of any known format"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__source": "/no/such/folder"}, "no such file or folder"),
        ({"model__image_size": 30}, "model.image_size 30 is no multiple of model.patch_size 8"),
        ({"model__ffn__kind": "magic"}, "unknown kind 'magic'"),
        ({"model__size": "vit_gigantic"}, "choose one of vit_tiny"),
        ({"model__size": "vit_tiny"}, "model.size vit_tiny means model.width 192, and 32 is set"),
        ({"data__source": "demo:nothing"}, "there are demo:train, demo:val"),
        ({"data__micro_batch_size": 3}, "the nearest valid sizes are 6 or 9"),
        ({"model__optimizer__muon__momentum": 0.9}, "optimizer.muon is set but optimizer.name is 'adamw'"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_no_run_folder(tmp_path, changes, message):
    from pretrain.errors import UserError

    with pytest.raises((UserError, SystemExit)) as error:
        train(tmp_path, **changes)
    if isinstance(error.value, UserError):
        assert message in str(error.value)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_pictures_smaller_than_a_patch_leaves_no_run_folder(tmp_path):
    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.new("RGB", (5, 50)).save(pictures / "thin.png")
    from pretrain.errors import UserError

    with pytest.raises(UserError, match=r"thin.png: 5 x 50 pixels, smaller than a patch of 8 x 8"):
        train(tmp_path / "runs", data__source=pictures, data__val_fraction=0)
    with pytest.raises(UserError, match="one picture, none can be held out"):
        train(tmp_path / "runs", data__source=pictures)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", ["mlp", "swiglu", "la"])
def test_other_kinds_train(tmp_path, kind):
    finished = train(tmp_path, model__ffn__kind=kind, trainer__max_steps=2, model__probe__every_n_steps=0)
    assert Path(finished.folder / "checkpoints" / "last.ckpt").is_file()


def test_pictures_of_one_class_are_trained_without_a_probe(tmp_path):
    """Unlabelled pictures often lie in a single sub-folder."""
    folder = write_folder(tmp_path / "photos", n_images=12, classes=("all",))
    finished = train(tmp_path / "runs", data__source=folder, trainer__max_steps=2, model__probe__every_n_steps=1)
    assert find_callback(finished.trainer, KnnProbe).latest == {}
