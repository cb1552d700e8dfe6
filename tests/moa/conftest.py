import pytest
import torch


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_test():
    torch.manual_seed(0)
