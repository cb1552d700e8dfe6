"""FSDP2 as a Lightning strategy: `--trainer.strategy fsdp2`, or `hsdp` for one replica of the parameters per node."""

from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.collectives.torch_collective import default_pg_timeout
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, StrategyRegistry
from torch import Tensor, nn

from pretrain.checkpoint import read_checkpoint
from pretrain.errors import UserError

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


class ShardedStrategy(ModelParallelStrategy):
    """Spread parameters, gradients and optimizer state over the devices (FSDP2), all of which read other samples.

    A checkpoint is a folder to which every device writes its slices; see `pretrain.shards`.

    Args:
        replicas: how many groups of devices each hold all parameters (HSDP); `nodes`: one group per node, so that
            parameters travel within a node, and between nodes only gradients. 1: all devices are one group.
        timeout: how long a rank waits for the others before it ends the job.
    """

    def __init__(self, replicas: int | Literal["nodes"] = 1, timeout: timedelta | None = default_pg_timeout) -> None:
        super().__init__(timeout=timeout)
        self.replicas = replicas
        self.shard_mesh: Any = None

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def setup_environment(self) -> None:
        self._data_parallel_size, self._tensor_parallel_size = self.num_nodes * self.num_processes, 1
        super().setup_environment()
        self.shard_mesh = self._make_mesh()

    def _make_mesh(self) -> Any:
        from torch.distributed.device_mesh import init_device_mesh

        replicas = self.num_nodes if self.replicas == "nodes" else self.replicas
        if not 1 <= replicas <= self.world_size or self.world_size % replicas:
            raise UserError(
                f"trainer.strategy has {replicas} replicas for {self.world_size} devices: "
                "the devices have to be a multiple of the replicas"
            )
        sizes = (replicas, self.world_size // replicas)
        if replicas == 1:
            return init_device_mesh(self.root_device.type, sizes[1:], mesh_dim_names=("shard",))
        return init_device_mesh(self.root_device.type, sizes, mesh_dim_names=("replicate", "shard"))

    def setup(self, trainer: L.Trainer) -> None:
        for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop):
            loop.inference_mode = False  # its tensors, parameters put together among them, are of no use for training
        super().setup(trainer)

    @property
    def compute_type(self) -> torch.dtype | None:
        """The type in which parameters are used, if it is not their own."""
        return torch.bfloat16 if self.precision_plugin.precision == "bf16-mixed" else None

    def prepare(self, model: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
        """Change, before blocks are compiled, what cannot compute with parameters of the compute type."""
        from pretrain import sharding

        if self.compute_type is not None:
            sharding.take_any_weight(model, classes)

    def shard(
        self,
        model: nn.Module,
        classes: tuple[type[nn.Module], ...],
        methods: tuple[str, ...],
        make: Callable[[], nn.Module],
    ) -> None:
        """Spread a model without memory over the devices, with the weights that `make` returns; see `sharding`."""
        from pretrain import sharding

        sharding.shard(model, classes, self.shard_mesh, compute_type=self.compute_type, methods=methods)
        sharding.fill(model, make, self.root_device)

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        assert self.lightning_module is not None
        return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        return (optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer).state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        from pretrain.shards import save_shards

        names = {id(parameter): name for name, parameter in self.lightning_module.named_parameters()}  # type: ignore[union-attr]
        ordered = [
            [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in self.optimizers
        ]
        save_shards(checkpoint, Path(self.broadcast(filepath)), ordered, self.shard_mesh)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Return a checkpoint, a folder or a file, whose tensors stay where they are until they are needed."""
        return read_checkpoint(self.broadcast(checkpoint_path), resumable=True, lazy=True)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        from pretrain.sharding import copy_slice

        targets = self.lightning_module_state_dict()
        with torch.no_grad():
            for name, stored in checkpoint["state_dict"].items():
                copy_slice(targets[name], stored)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            mine = {
                number: {key: _my_part(stored, parameters[number]) for key, stored in entry.items()}
                for number, entry in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": mine})


def _my_part(stored: Any, parameter: Tensor) -> Any:
    """Return this rank's slice of the state of a parameter; what is not of the parameter's shape is whole anywhere."""
    from torch.distributed.tensor import DTensor

    from pretrain.sharding import copy_slice, like

    if not isinstance(parameter, DTensor) or tuple(stored.shape) != tuple(parameter.shape) or not stored.ndim:
        return torch.empty(stored.shape, dtype=stored.dtype).copy_(stored[()])
    local = torch.empty_like(parameter.to_local(), dtype=stored.dtype)
    mine = like(parameter, local)
    copy_slice(mine, stored)
    return mine


def check_strategy(trainer: L.Trainer) -> None:
    """Raise a UserError for a strategy, or a precision with it, that a run cannot be trained or saved with."""
    strategy = trainer.strategy
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy) and not isinstance(strategy, ShardedStrategy):
        raise UserError(f"trainer.strategy {type(strategy).__name__} is not supported: use fsdp2 or hsdp")
    if isinstance(strategy, ShardedStrategy) and trainer.precision not in PRECISIONS:
        raise UserError(
            f"trainer.precision {trainer.precision} does not go with a sharded model: choose one of "
            f"{', '.join(PRECISIONS)}"
        )


StrategyRegistry.register("fsdp2", ShardedStrategy, description=ShardedStrategy.__doc__, replicas=1)
StrategyRegistry.register("hsdp", ShardedStrategy, description="fsdp2 with a replica per node", replicas="nodes")
