"""The Triton kernels: what they compute, in Triton's interpreter, and that they compile for a GPU, without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")
HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TYPE_ONE = ("gelu", "silu", "relu2", "leaky_relu", "relu")
ALL = ("id", "gelu", "silu", "relu2", "leaky_relu", "tanh", "relu")
QUADRATIC = ("id", "gelu", "silu", "relu2")


def test_the_kernels_agree_with_the_reference_in_the_interpreter():
    # In a process of its own: Triton reads the variable once, when it is imported, and other tests import it too.
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        str(HERE / "interpreted_triton.py"),
    ]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


class Hopper:
    """As much of a Triton driver as compiling takes: an H100 or H200 that is not there."""

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return "hopper"  # a key for Triton's caches

    def get_current_stream(self, device=None):
        return 0


class Compiler:
    """A kernel that is compiled as it would be for a launch, and then not launched."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def compile_it(*arguments, **options):
            self.result = self.kernel.warmup(*arguments, grid=grid, **options)

        return compile_it


@pytest.fixture
def compiled(monkeypatch):
    """A function (direction, form, names, D) -> the compiled kernel for bfloat16 rows and float32 gates."""
    binaries = Path(triton.__file__).parent / "backends/nvidia/bin"
    if os.environ.get("TRITON_INTERPRET") == "1" or not (binaries / "ptxas").exists():
        pytest.skip("needs Triton's compiler, and its assembler for NVIDIA's GPUs")
    from triton.runtime.driver import driver

    from moa.kernels import triton_mix

    monkeypatch.setattr(driver, "_active", Hopper())

    def run(direction, form, names, D):
        compiler = Compiler(getattr(triton_mix, f"{direction}_kernel"))
        monkeypatch.setattr(triton_mix, f"{direction}_kernel", compiler)
        y = torch.empty(4, D, dtype=torch.bfloat16)
        z = None if form == "type_one" else torch.empty_like(y)
        rows = len(names) * (len(names) + 1) // 2 if form == "quadratic" else len(names)
        tensors = (y, z, torch.empty(4, rows), torch.empty(4, rows) if form == "bi_sided" else None)
        if direction == "forward":
            triton_mix.forward(form, *tensors, names)
        else:
            triton_mix.backward(form, torch.empty_like(y), *tensors, names)
        return compiler.result

    return run


# How often a channel needs 2^t and 1/t: SiLU one of each, GELU 2^t for Phi and in the backward one more for its
# density, tanh one instruction of its own. More would mean that a value and its derivative no longer share theirs.
CASES = [
    ("forward", "type_one", TYPE_ONE, {"ex2": 2, "rcp": 1, "tanh": 0}, 1),
    ("backward", "type_one", TYPE_ONE, {"ex2": 3, "rcp": 1, "tanh": 0}, 2),
    ("backward", "bi_sided", ALL, {"ex2": 6, "rcp": 2, "tanh": 2}, 3),
    ("forward", "quadratic", QUADRATIC, {"ex2": 4, "rcp": 2, "tanh": 0}, 2),
    ("backward", "quadratic", QUADRATIC, {"ex2": 6, "rcp": 2, "tanh": 0}, 3),
]


@pytest.mark.parametrize(("direction", "form", "names", "instructions", "matrices"), CASES)
def test_a_kernel_shares_the_costly_instructions_and_reads_16_bytes_at_a_time(
    compiled, direction, form, names, instructions, matrices
):
    assembly = compiled(direction, form, names, 2048).asm["ptx"]
    count = {name: len(re.findall(rf"\b{name}\.approx", assembly)) for name in instructions}
    assert count == {name: 8 * times for name, times in instructions.items()}
    assert len(re.findall(r"ld\.global\S*\.v4\.b32", assembly)) == matrices


def test_rows_that_start_at_every_fourth_byte_are_read_4_bytes_at_a_time(compiled):
    assembly = compiled("backward", "one_sided", ("id",), 2730).asm["ptx"]
    gate, three_matrices = 1, 3 * 4
    assert len(re.findall(r"ld\.global\S*\.b32", assembly)) == gate + three_matrices
    assert "b16" not in " ".join(re.findall(r"(?:ld|st)\.global\S*", assembly))


@pytest.mark.parametrize("D", [2048, 3413])
def test_the_largest_dictionary_still_fits_the_registers(compiled, tmp_path, D):
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled("backward", "quadratic", ALL, D).asm["cubin"])
    dump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    if not dump.exists():
        pytest.skip("this Triton has no cuobjdump")
    usage = subprocess.run([dump, "-res-usage", cubin], capture_output=True, text=True, check=True).stdout
    assert "STACK:0" in usage, usage
