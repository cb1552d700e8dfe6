"""Muon on matrices whose rows are spread over devices: each is put together on one device, which orthogonalises it.

The matrices are shared out by the work that they are. In rounds that bound the memory, every device sends its rows of
each update to the matrix's owner, and gets its rows of the direction back: two all-to-alls in the type in
which directions are computed anyway (bfloat16), so that the result is that of one device. Momentum stays with the rows.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from pretrain.optim import (
    MAX_BATCH_ELEMENTS,
    batches_of_equal_matrices,
    local,
    momentum_update,
    move,
    orthogonalise,
    prefers_single_matrices,
)
from pretrain.sharding import shard_dimension


def is_split(parameter: Tensor) -> bool:
    """Return whether a device holds but a part of a matrix; a stack is spread by whole matrices."""
    if not isinstance(parameter, DTensor) or parameter.ndim != 2:
        return False
    dimension = shard_dimension(parameter)
    return dimension is not None and parameter.device_mesh.size(dimension) > 1


def step_of_split_matrices(
    parameters: Sequence[Tensor], buffers: Sequence[Tensor], group: dict[str, Any], skip: Tensor | None
) -> None:
    """Update matrices in place; a call for all ranks, with the same parameters.

    Args:
        parameters: with gradients, all spread over the rows on one mesh.
        buffers: the momentum of each.
        group: the settings of their optimizer group.
        skip: a scalar on the device; where it is not 0, nothing changes.
    """
    first = parameters[0]
    assert isinstance(first, DTensor)
    dimension, mesh = shard_dimension(first), first.device_mesh
    assert dimension is not None
    n_ranks = mesh.size(dimension)
    momentum = {id(parameter): buffer for parameter, buffer in zip(parameters, buffers, strict=True)}
    shares = [batches_of_equal_matrices(share, MAX_BATCH_ELEMENTS) for share in share_out(parameters, n_ranks)]
    for number in range(max(map(len, shares))):
        owned = [share[number] if number < len(share) else [] for share in shares]
        _Round(owned, mesh.get_local_rank(dimension), mesh.get_group(dimension)).run(momentum, group, skip)


def share_out(parameters: Sequence[Tensor], n_ranks: int) -> list[list[Tensor]]:
    """Return the matrices of each rank, so that none has much more work than the others."""
    shares: list[list[Tensor]] = [[] for _ in range(n_ranks)]
    work = [0] * n_ranks
    for parameter in sorted(parameters, key=_work, reverse=True):  # stable: the same on all ranks
        rank = work.index(min(work))
        shares[rank].append(parameter)
        work[rank] += _work(parameter)
    return shares


def _work(parameter: Tensor) -> int:
    """The multiplications of Newton-Schulz, up to a factor: products of a Gram matrix of the shorter side."""
    return min(parameter.shape) ** 2 * (sum(parameter.shape))


Slice = tuple[Tensor, int]  # a matrix, and the rank whose rows of it are meant


class _Round:
    """One exchange: `owned[r]` are the matrices that rank r puts together, of one shape up to transposition."""

    def __init__(self, owned: list[list[Tensor]], rank: int, group: Any) -> None:
        self.owned, self.rank, self.group = owned, rank, group
        # What each rank has of the matrices that this one owns, and what this one has of those that each rank owns.
        self.of_mine = [[(matrix, other) for matrix in owned[rank]] for other in range(len(owned))]
        self.of_theirs = [[(matrix, rank) for matrix in matrices] for matrices in owned]

    def run(self, momentum: dict[int, Tensor], settings: dict[str, Any], skip: Tensor | None) -> None:
        updates = [
            momentum_update(local(matrix.grad), local(momentum[id(matrix)]), settings, skip)
            for matrix in chain(*self.owned)
        ]
        nothing = updates[0].new_empty(0)
        parts = self._exchange(updates, self.of_theirs, self.of_mine, nothing)
        wholes = [torch.cat(pieces) for pieces in zip(*parts, strict=True)]
        if wholes and prefers_single_matrices(wholes[0]):
            directions = [orthogonalise([whole], settings["ns_steps"])[0] for whole in wholes]
        else:
            directions = orthogonalise(wholes, settings["ns_steps"]) if wholes else []
        slices = [
            direction[self._first(matrix, rank) : self._first(matrix, rank + 1)]
            for pieces in self.of_mine
            for (matrix, rank), direction in zip(pieces, directions, strict=True)
        ]
        back = self._exchange(slices, self.of_mine, self.of_theirs, nothing)
        for matrix, direction in zip(chain(*self.owned), chain(*back), strict=True):
            move(local(matrix), direction, settings, max(matrix.shape), skip)

    def _exchange(
        self, outgoing: list[Tensor], sent: list[list[Slice]], expected: list[list[Slice]], nothing: Tensor
    ) -> list[list[Tensor]]:
        """Send slices, of which `sent[r]` go to rank r, and return those that come, of which `expected[r]` from it."""
        flat = torch.cat([nothing, *(piece.reshape(-1) for piece in outgoing)])
        received = flat.new_empty(sum(map(self._size, chain(*expected))))
        come, go = ([sum(map(self._size, pieces)) for pieces in each] for each in (expected, sent))
        dist.all_to_all_single(received, flat, come, go, group=self.group)
        parts = iter(received.split([self._size(piece) for piece in chain(*expected)]))
        return [[next(parts).view(-1, matrix.shape[1]) for matrix, _ in pieces] for pieces in expected]

    def _first(self, matrix: Tensor, rank: int) -> int:
        rows_each = -(-matrix.shape[0] // len(self.owned))  # as torch.chunk
        return min(rank * rows_each, matrix.shape[0])

    def _size(self, piece: Slice) -> int:
        matrix, rank = piece
        return (self._first(matrix, rank + 1) - self._first(matrix, rank)) * matrix.shape[1]
