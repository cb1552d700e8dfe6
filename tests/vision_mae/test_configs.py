"""The shipped configurations are what they say."""

import shutil

import pytest
import yaml

from pretrain.cli import config_folder
from pretrain.schedules import ScheduleConfig, lr_multiplier
from tests.vision_mae.pictures import write_folder
from vision_mae.fit import run


@pytest.mark.slow
def test_the_paper_s_run_takes_a_step_of_the_full_model(tmp_path):
    pictures = write_folder(tmp_path / "pictures", n_images=2, classes=(), side=64)
    finished = run(
        [
            *("--config", str(config_folder() / "mae_vitb16.yaml"), "--data.source", str(pictures)),
            *("--trainer.max_steps", "1", "--data.global_batch_size", "2", "--data.micro_batch_size", "2"),
            *("--data.num_workers", "0", "--trainer.accelerator", "cpu", "--trainer.precision", "32"),
            *("--trainer.enable_progress_bar", "false", "--runs_dir", str(tmp_path / "runs")),
        ]
    )
    assert finished.module.parameter_counts()["total"] == 111_585_024
    assert finished.trainer.global_step == 1
    shutil.rmtree(finished.folder / "checkpoints")  # 1.3 GB


def test_the_paper_s_recipe():
    """800 epochs of 1,281,167 pictures in batches of 4,096: warm-up over 40 epochs, then a cosine to zero."""
    config = yaml.safe_load((config_folder() / "mae_vitb16.yaml").read_text())
    optimizer, schedule = config["model"]["optimizer"], config["model"]["schedule"]
    assert (optimizer["betas"], optimizer["eps"], optimizer["weight_decay"]) == ([0.9, 0.999], 1e-8, 0.05)
    assert (config["trainer"]["max_epochs"], config["data"]["global_batch_size"]) == (800, 4096)
    steps_per_epoch = 1_281_167 / 4096
    total = round(800 * steps_per_epoch)

    def multiplier(step: int) -> float:
        return lr_multiplier(step, total, ScheduleConfig(**schedule), steps_per_epoch)

    assert multiplier(round(20 * steps_per_epoch)) == pytest.approx(0.5, abs=1e-3)
    assert multiplier(round(40 * steps_per_epoch)) == pytest.approx(1.0, abs=1e-6)
    assert multiplier(round(420 * steps_per_epoch)) == pytest.approx(0.5, abs=1e-3)
    assert multiplier(total - 1) == 0.0
