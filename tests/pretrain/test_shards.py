"""Checkpoints in slices: read as what they hold, refused when they hold less, and never executed."""

import json
import shutil
import zipfile
import zlib

import pytest
import torch
from safetensors.torch import save_file

from pretrain.checkpoint import AtomicCheckpointIO, find_checkpoint, read_checkpoint
from pretrain.consolidate import consolidate, main
from pretrain.errors import UserError
from pretrain.recovery import why_torn

GROUPS = [{"name": "all", "lr": 0.1, "params": [0, 1]}]
NAMES = ["model.b", "model.w"]  # the optimizer's order
WEIGHT, AVERAGE, BIAS = torch.arange(15.0).view(5, 3), torch.arange(15.0).view(5, 3) + 100, torch.tensor([1.0, 2.0])


def part(folder, index, count, rows, **tensors):
    tensors = {name.replace("__", "/").replace("_of_", "."): value.contiguous() for name, value in tensors.items()}
    file = folder / f"part-{index:05d}-of-{count:05d}.safetensors"
    checksums = {name: zlib.crc32(bytes(value.flatten().numpy())) for name, value in tensors.items()}
    save_file(tensors, file, metadata={"rows": json.dumps(rows), "crc32": json.dumps(checksums)})


@pytest.fixture
def folder(tmp_path):
    """What three ranks write of a matrix of five rows, a vector of two, and a scalar."""
    folder = tmp_path / "run" / "checkpoints" / "last.ckpt"
    folder.mkdir(parents=True)
    state = {"weight_names": ["model.w", "model.b"], "optimizers": [(NAMES, GROUPS)]}
    state |= {"global_step": 3, "pytorch-lightning_version": "2", "loops": {}, "lr_schedulers": []}
    state |= {"config": {"model": {"a": 1}, "data": {}}}
    torch.save(state, folder / "state.ckpt")
    for rank, (first, last) in enumerate([(0, 2), (2, 4), (4, 5)]):
        average = "optimizer.0/model.w/exp_avg"
        rows = {"weights/model.w": (first, 5), average: (first, 5), "weights/model.b": (min(rank, 2), 2)}
        tensors = {"weights/model.w": WEIGHT[first:last], average: AVERAGE[first:last]}
        tensors["weights/model.b"] = BIAS[rank : rank + 1]
        if rank == 0:
            tensors["optimizer.0/model.w/step"] = torch.tensor(3.0)
        part(folder, rank, 3, rows, **tensors)
    return folder


def assert_whole(checkpoint):
    assert torch.equal(checkpoint["state_dict"]["model.w"], WEIGHT)
    assert torch.equal(checkpoint["state_dict"]["model.b"], BIAS)
    (optimizer,) = checkpoint["optimizer_states"]
    assert list(optimizer["state"]) == [1]
    assert torch.equal(optimizer["state"][1]["exp_avg"], AVERAGE)
    assert optimizer["state"][1]["step"] == 3
    assert optimizer["param_groups"] == GROUPS
    assert (checkpoint["global_step"], checkpoint["config"]) == (3, {"model": {"a": 1}, "data": {}})


def test_slices_become_the_checkpoint_that_one_process_would_have_written(folder):
    assert find_checkpoint(folder.parent.parent) == folder
    assert_whole(read_checkpoint(folder, resumable=True))
    assert "optimizer_states" not in read_checkpoint(folder)


def test_any_rows_can_be_read_alone(folder):
    stored = read_checkpoint(folder, lazy=True)["state_dict"]["model.w"]
    assert stored.shape == (5, 3)
    for first in range(6):
        for last in range(first, 7):
            assert torch.equal(stored[first:last], WEIGHT[first:last])


def test_one_file_is_made_of_the_slices(folder, capsys):
    file = consolidate(str(folder.parent.parent))
    assert file == folder.parent / "last.consolidated.ckpt"
    assert_whole(read_checkpoint(file, resumable=True))
    assert sorted(path.name for path in folder.parent.iterdir()) == ["last.ckpt", "last.consolidated.ckpt"]
    for arguments, problem in (([str(folder)], "exists already"), ([str(file)], "a single file already")):
        with pytest.raises(SystemExit) as stop:
            main(["--checkpoint", *arguments])
        assert stop.value.code == 2
        assert problem in capsys.readouterr().err


def test_a_file_takes_the_place_of_a_folder(folder):
    """A run that goes on with one process writes files."""
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"a": BIAS}}, folder)
    assert torch.equal(read_checkpoint(folder)["state_dict"]["a"], BIAS)
    assert [path.name for path in folder.parent.iterdir()] == ["last.ckpt"]


def test_a_kill_between_the_two_moves_of_a_save_loses_nothing(folder):
    aside = folder.with_name(".last.ckpt.retired")
    folder.rename(aside)
    assert_whole(read_checkpoint(find_checkpoint(folder.parent.parent), resumable=True))
    assert find_checkpoint(folder.parent.parent.parent) == aside


@pytest.mark.parametrize("name", ["part-00000-of-00003.safetensors", "part-00002-of-00003.safetensors", "state.ckpt"])
def test_a_flipped_bit_is_found(folder, name):
    """The last byte of a part belongs to a tensor."""
    assert why_torn(folder) is None
    content = bytearray((folder / name).read_bytes())
    content[content.index(b"model.w") if name == "state.ckpt" else -1] ^= 1
    (folder / name).write_bytes(content)
    assert str(folder) in why_torn(folder)


class Executed:
    def __reduce__(self):
        return (pytest.fail, ("executed",))


def lose_a_part(folder):
    (folder / "part-00001-of-00003.safetensors").unlink()


def cut_a_part(folder):
    file = folder / "part-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-5])


def mix_two_saves(folder):
    shutil.copy(folder / "part-00001-of-00003.safetensors", folder / "part-00000-of-00004.safetensors")


def claim_a_terabyte(folder):
    part(folder, 2, 3, {"weights/model.w": (4, 10**11)}, **{"weights/model.w": WEIGHT[4:]})


def overlap(folder):
    part(folder, 2, 3, {"weights/model.w": (3, 5)}, **{"weights/model.w": WEIGHT[4:]})


def another_type(folder):
    part(folder, 2, 3, {"weights/model.w": (4, 5)}, **{"weights/model.w": WEIGHT[4:].double()})


def name_no_tensor(folder):
    state = torch.load(folder / "state.ckpt")
    torch.save(state | {"weight_names": ["model.other"]}, folder / "state.ckpt")


def hide_code(folder):
    torch.save({"weight_names": [], "optimizers": [], "x": Executed()}, folder / "state.ckpt")


def claim_numbers_that_are_not_there(folder):
    state = torch.load(folder / "state.ckpt")
    torch.save(state | {"x": torch.zeros(1).expand(10**12)}, folder / "state.ckpt")


def compress_the_state(folder):
    with zipfile.ZipFile(folder / "state.ckpt") as archive:
        parts = {info.filename: archive.read(info) for info in archive.infolist()}
    with zipfile.ZipFile(folder / "state.ckpt", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content)


SPOILT = [lose_a_part, cut_a_part, mix_two_saves, claim_a_terabyte, overlap, another_type, name_no_tensor, hide_code]


@pytest.mark.parametrize("spoil", [*SPOILT, claim_numbers_that_are_not_there, compress_the_state])
def test_what_is_not_whole_is_refused(folder, spoil):
    spoil(folder)
    with pytest.raises(UserError, match="checkpoint"):
        read_checkpoint(folder, resumable=True)
