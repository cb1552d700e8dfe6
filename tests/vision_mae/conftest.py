"""One trained run for all tests that only look at what a run leaves."""

import pytest

from pretrain.cli import FinishedRun
from tests.vision_mae.runs import train


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return train(tmp_path_factory.mktemp("trained"))
