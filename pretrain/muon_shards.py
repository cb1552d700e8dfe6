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
    parameters: Sequence[Any], buffers: Sequence[Any], group: dict[str, Any], skip: Tensor | None
) -> None:
    """Update matrices in place; a call for all ranks, with the same parameters.

    Args:
        parameters: with gradients, all spread over the rows on one mesh.
        buffers: the momentum of each.
        group: the settings of their optimizer group.
        skip: a scalar on the device; where it is not 0, nothing changes.
    """
    dimension = shard_dimension(parameters[0])
    assert dimension is not None
    mesh = parameters[0].device_mesh
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


class _Round:
    """One exchange: `owned[r]` are the matrices that rank r puts together, all of one shape up to transposition."""

    def __init__(self, owned: list[list[Tensor]], rank: int, group: Any) -> None:
        self.owned, self.rank, self.group = owned, rank, group
        self.everyone = range(len(owned))

    def run(self, momentum: dict[int, DTensor], settings: dict[str, Any], skip: Tensor | None) -> None:
        mine = self.owned[self.rank]
        updates = [
            momentum_update(local(parameter.grad), local(momentum[id(parameter)]), settings, skip)
            for matrices in self.owned
            for parameter in matrices
        ]
        self.nothing = updates[0].new_empty(0)
        parts = self._exchange(updates, [sum(self._size(p, self.rank) for p in m) for m in self.owned], self._of_mine)
        whole = [torch.cat(list(pieces)) for pieces in zip(*parts, strict=True)]
        if whole and prefers_single_matrices(whole[0]):
            directions = [orthogonalise([matrix], settings["ns_steps"])[0] for matrix in whole]
        else:
            directions = orthogonalise(whole, settings["ns_steps"]) if whole else []
        slices = [
            direction[self._first(matrix, rank) :][: self._rows(matrix, rank)]
            for rank in self.everyone
            for matrix, direction in zip(mine, directions, strict=True)
        ]
        sizes = [sum(self._size(matrix, rank) for matrix in mine) for rank in self.everyone]
        back = self._exchange(slices, sizes, lambda rank: [(p, self.rank) for p in self.owned[rank]])
        for parameter, direction in zip(chain(*self.owned), chain(*back), strict=True):
            move(local(parameter), direction, settings, max(parameter.shape), skip)

    def _of_mine(self, rank: int) -> list[tuple[Tensor, int]]:
        return [(matrix, rank) for matrix in self.owned[self.rank]]

    def _exchange(self, outgoing: list[Tensor], sizes: list[int], expected: Any) -> list[list[Tensor]]:
        """Send tensors, of which `sizes[r]` elements go to rank r; return what comes from each rank.

        Args:
            expected: rank -> (matrix, rank) of each slice that comes from it: those rows of the matrix.
        """
        flat = [tensor.reshape(-1) for tensor in outgoing]
        sent = torch.cat(flat) if flat else self.nothing
        slices = [expected(rank) for rank in self.everyone]
        lengths = [[self._size(*piece) for piece in pieces] for pieces in slices]
        received = sent.new_empty(sum(map(sum, lengths)))
        dist.all_to_all_single(received, sent, [sum(each) for each in lengths], sizes, group=self.group)
        parts = received.split([length for each in lengths for length in each])
        shaped = iter(
            part.view(-1, matrix.shape[1])
            for part, (matrix, _) in zip(parts, (piece for pieces in slices for piece in pieces), strict=True)
        )
        return [[next(shaped) for _ in pieces] for pieces in slices]

    def _first(self, matrix: Tensor, rank: int) -> int:
        rows_each = -(-matrix.shape[0] // len(self.owned))  # as torch.chunk
        return min(rank * rows_each, matrix.shape[0])

    def _rows(self, matrix: Tensor, rank: int) -> int:
        return self._first(matrix, rank + 1) - self._first(matrix, rank)

    def _size(self, matrix: Tensor, rank: int) -> int:
        return self._rows(matrix, rank) * matrix.shape[1]
