"""Strategies whose optimizers are `pydist.ShardedOptimizer`s, made of those that the program made.

Checkpoints hold the whole state in the form of torch's optimizers, as those of "ddp" do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydist.integrations.lightning.strategies import FabricMethods, TrainerMethods
from pydist.integrations.sharded_optimizers import shard, whole_state


class _Sharded:
    """What strategies for `Trainer` and for `Fabric` have in common.

    Args:
        *args: Of Lightning's strategy.
        stage: 1 or 2, as for `pydist.ShardedOptimizer`; default: 1.
        master_weights: As there; default: "auto".
        **kwargs: Of Lightning's strategy, and of `pydist.DataParallel`.
    """

    def __init__(
        self, *args: Any, stage: Any = 1, master_weights: Any = "auto", **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._settings = {"stage": stage, "master_weights": master_weights}

    def _shard(self, optimizers: Iterable[Any], schedulers: Iterable[Any]) -> list[Any]:
        return shard(
            optimizers,
            schedulers,
            caller="a sharded strategy",
            otherwise="choose strategy='pydist'",
            **self._settings,
        )


class ShardedTrainerMethods(_Sharded, TrainerMethods):
    """Of a strategy for `Trainer`; see `_Sharded` for arguments."""

    optimizers: list[Any]
    # Lightning's wrapper around optimizers.
    _optimizer_class: type

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        self.optimizers = self._shard(self.optimizers, schedulers)

    def optimizer_state(self, optimizer: Any) -> Any:
        is_wrapped = isinstance(optimizer, self._optimizer_class)
        whole = whole_state(optimizer.optimizer if is_wrapped else optimizer)
        return super().optimizer_state(optimizer) if whole is None else whole


class ShardedFabricMethods(_Sharded, FabricMethods):
    """Of a strategy for `Fabric`; see `_Sharded` for arguments."""

    def setup_module_and_optimizers(
        self, module: Any, optimizers: list[Any], scheduler: Any = None
    ) -> tuple[Any, list[Any], Any]:
        module = self.setup_module(module)
        made = self._shard(optimizers, [] if scheduler is None else [scheduler])
        return module, made, scheduler

    def setup_optimizer(self, optimizer: Any) -> Any:
        return self._shard([optimizer], [])[0]

    def get_optimizer_state(self, optimizer: Any) -> Any:
        whole = whole_state(optimizer)
        return super().get_optimizer_state(optimizer) if whole is None else whole
