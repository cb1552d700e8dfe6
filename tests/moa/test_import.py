"""`import moa` is light: benchmarks and machines without the training libraries can use the layers."""

import subprocess
import sys

SCRIPT = """
import sys, time
import torch
before = set(sys.modules)
start = time.perf_counter()
import moa, moa.theory
seconds = time.perf_counter() - start
moa.timm_mlp("qd-moa")(in_features=8, hidden_features=32)(torch.randn(2, 8))
heavy = {"lightning", "pytorch_lightning", "timm", "torchvision", "transformers", "datasets"}
heavy |= {"pretrain", "lm", "moa.kernels.triton_mix", "matplotlib"}
print(seconds < 1.0, sorted(heavy & set(sys.modules)), sorted(set(moa.__all__) - set(dir(moa))))
"""


def test_import_takes_less_than_a_second_beyond_torch_and_pulls_in_no_training_library():
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "True [] []"
