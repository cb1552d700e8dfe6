"""A model spread over several devices by FSDP2: which parts travel together, where weights come from, how to read one.

Every device holds a slice of the rows of each parameter, as a DTensor, and its gradient and optimizer state with it. A
block's parameters are put together (in the type of the computation) when it is called, and let go afterwards. Names
and global shapes stay those of the plain model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard


def take_any_weight(model: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
    """Let the norms inside modules of these classes take weights of a lower precision than their input.

    The residual stream is float32, and a norm computes in the type of its input. The kernels of torch want the weight
    in the same type, which FSDP2 hands over in that of the matrix products.
    """
    for unit in [module for module in model.modules() if isinstance(module, classes)]:
        for module in unit.modules():
            if isinstance(module, nn.RMSNorm | nn.LayerNorm):
                module.__class__ = _any_weight(type(module))  # type: ignore[arg-type,assignment]


@cache  # equal blocks stay of one class, for which the compiler works once
def _any_weight(kind: type[nn.Module]) -> type[nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.to(x.dtype)
        if isinstance(self, nn.RMSNorm):
            return F.rms_norm(x, self.normalized_shape, weight, self.eps)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)

    return type(kind.__name__, (kind,), {"forward": forward})


def shard(
    model: nn.Module,
    classes: tuple[type[nn.Module], ...],
    mesh: DeviceMesh,
    *,
    compute_type: torch.dtype | None = None,
    methods: tuple[str, ...] = (),
) -> None:
    """Spread the parameters of a model over a mesh, in place; after its blocks were compiled.

    Args:
        classes: modules whose parameters are put together and let go as one, one after the other. What is in none of
            them belongs to the whole model, and is together from its call to the end of the backward.
        mesh: one dimension, or two: replicas that each hold all parameters (HSDP), and the devices of a replica.
        compute_type: in which the parameters of `classes` are sent and used; None: in their own. The slices, their
            gradients (also while they are summed over devices) and the rest of the model keep their own type.
        methods: what of the model is called besides its forward.
    """
    exact = MixedPrecisionPolicy(cast_forward_inputs=False)
    # Autocast decides the types of activations, as on a single device: the residual stream stays float32.
    compute = MixedPrecisionPolicy(param_dtype=compute_type, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in [module for module in model.modules() if isinstance(module, classes)]:
        fully_shard(module, mesh=mesh, mp_policy=exact if compute_type is None else compute)
    fully_shard(model, mesh=mesh, mp_policy=exact)
    for name in methods:
        register_fsdp_forward_method(model, name)


@torch.no_grad()
def fill(model: nn.Module, make: Callable[[], nn.Module], device: torch.device) -> None:
    """Give a sharded model without memory (on the meta device) the weights that `make` returns.

    Only rank 0 makes them, on its CPU, as a run on one device does: so the same seed gives the same weights to the last
    bit. The others see one tensor at a time. All ranks go on with the random numbers of rank 0.

    Raises:
        Exception: on all ranks, what `make` raises on rank 0.
    """
    model.to_empty(device=device)
    source: dict[str, Tensor] = {}
    outcome: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            whole = make()
            source = dict([*whole.named_parameters(), *whole.named_buffers()])
        except Exception as error:  # the others wait: they have to hear of it
            outcome[0] = error
        outcome[1] = torch.get_rng_state()
    dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]
    torch.set_rng_state(outcome[1])
    for name, target in [*model.named_parameters(), *model.named_buffers()]:
        value = source[name].to(device) if source else torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(value, src=0)
        copy_slice(target, value)


def copy_slice(target: Tensor, whole: Any) -> None:
    """Copy a whole tensor (or what can be sliced by rows like one) into a tensor, or into this rank's slice of it."""
    if isinstance(target, DTensor):
        first, local = first_row(target), target.to_local()
        local.copy_(whole[first : first + len(local)])
    else:
        target.copy_(whole[:] if target.ndim else whole[()])


def first_row(tensor: DTensor) -> int:
    """Return the number of the first row that this rank holds of a tensor sharded over rows."""
    dimension = shard_dimension(tensor)
    if dimension is None:
        return 0
    rows_each = -(-tensor.shape[0] // tensor.device_mesh.size(dimension))  # as torch.chunk
    return min(rows_each * tensor.device_mesh.get_local_rank(dimension), tensor.shape[0])


def shard_dimension(tensor: DTensor) -> int | None:
    """Return the dimension of the mesh over which the rows of a tensor are spread; None: each device has them all."""
    for dimension, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            assert placement.dim == 0
            return dimension
    return None


def like(parameter: DTensor, local: Tensor) -> DTensor:
    """Return this rank's slice as a part of a tensor that is spread as a parameter is."""
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that may be spread over devices as a plain one; a call for all ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@contextmanager
def gathered(root: nn.Module, module: nn.Module) -> Iterator[None]:
    """Put the parameters of a submodule together, to read it outside of a forward pass; a call for all ranks."""
    units = [unit for unit in root.modules() if isinstance(unit, FSDPModule) and unit is not root]
    units = [unit for unit in units if any(child is module for child in unit.modules())]
    for unit in units:
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
