"""Transformers' Trainer on pydist: one import of a script changes.

from pydist.integrations.transformers import Trainer
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers
import transformers.trainer
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import find_batch_size
from torch import Tensor, nn
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.utils.import_utils import check_torch_load_is_safe

import pydist
from pydist.errors import InvalidUsage
from pydist.integrations.accelerate import Accelerator
from pydist.integrations.sharded_optimizers import shard, whole_state

# What a label is where there is nothing to learn, for torch and Transformers.
_IGNORED = -100

__all__ = ["Trainer"]


@contextlib.contextmanager
def _making_accelerators(make: Callable[..., Any]) -> Iterator[None]:
    """Has Transformers make its Accelerator by a function of ours inside.

    It takes the class from its own module, and a subclass can give arguments alone.
    """
    own = transformers.trainer.Accelerator
    transformers.trainer.Accelerator = make
    try:
        yield
    finally:
        transformers.trainer.Accelerator = own


class _Saved:
    """In place of an optimizer while Transformers saves it: has its whole state."""

    def __init__(self, state: dict[str, Any]) -> None:
        self._state = state

    def state_dict(self) -> dict[str, Any]:
        """What Transformers saves of an optimizer."""
        return self._state


class GlobalBatch(TrainerCallback, ExportableState):  # named in trainer_state.json
    """Keeps in every checkpoint how many samples a step has, and refuses another number."""

    def __init__(self) -> None:
        self.samples = 0

    def state(self) -> dict[str, Any]:
        """What Transformers saves of a callback."""
        return {"args": {}, "attributes": {"samples": self.samples}}

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, train_dataloader: Any, **kwargs: Any
    ) -> None:
        """Compares with the checkpoint, where there is one."""
        saved = state.stateful_callbacks.get(type(self).__name__, {}) if state.global_step else {}
        before = saved.get("attributes", {}).get("samples", 0)
        size = getattr(train_dataloader, "total_batch_size", 0)
        self.samples = size * args.gradient_accumulation_steps
        if before and self.samples and before != self.samples:
            raise InvalidUsage(
                f"the checkpoint is from a training with {before} samples in a step of all "
                f"processes, and now a step has {self.samples}: choose per_device_train_batch_size "
                "and gradient_accumulation_steps so that their product with the number of "
                f"processes is {before}, or train with accelerator_config={{'split_batches': "
                "True}, where the batch size is that of all processes."
            )


class _TrainersAccelerator(Accelerator):
    """Speaks of arguments of the Trainer's."""

    _needed_on_cpus = "TrainingArguments(use_cpu=True)"


class _ShardingAccelerator(_TrainersAccelerator):
    """Shards an optimizer where Transformers has it prepared: by then the model is wrapped."""

    def __init__(self, *args: Any, shard: Callable[[Any], Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._shard = shard

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        # One that comes again, in another training of the same Trainer, is sharded already.
        if not isinstance(optimizer, AcceleratedOptimizer):
            optimizer = self._shard(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)


def _warn_of_another_backend() -> None:
    """Says what does not run on pydist, where Transformers has made the process group before."""
    if pydist.is_initialized() or not dist.is_initialized() or dist.get_backend() == "pydist":
        return
    warnings.warn(
        f"the process group was made with backend '{dist.get_backend()}' before pydist joined the "
        "job, as TrainingArguments does: gradients are averaged by pydist, but whatever else "
        "Transformers asks of all processes goes through that backend. Call pydist.init() before "
        "TrainingArguments, and all of it runs on pydist.",
        stacklevel=3,
    )


class Trainer(transformers.Trainer):
    """Transformers' `Trainer`, on the Accelerator of `pydist.integrations.accelerate`.

    Every process makes one. The model is wrapped in `pydist.DataParallel`, samples are shared out
    by pydist, and the mean over tokens is exact: Transformers scales the loss where it counts the
    tokens of a step; where it doesn't, since the model takes no `num_items_in_batch`, each
    micro-batch counts by its labels, or by its samples if it has none.

    A checkpoint goes on with any number of processes on which a step has as many samples, with a
    sharded optimizer or without, however it was saved.

    Args:
        *args: Transformers' own.
        sharded: 1 or 2 makes a `pydist.ShardedOptimizer` of that stage of the optimizer, which
            `args.optim` or `optimizers` gives; 0, the default, leaves the optimizer as it is.
        master_weights: As for `pydist.ShardedOptimizer`, where `sharded` is given: "auto", the
            default, updates a model in 16 bits through float32 copies, and False updates it as the
            optimizer itself would.
        **kwargs: Transformers' own.

    Raises:
        InvalidUsage: What the Accelerator refuses; or `sharded` is another number, or is given with
            an argument that it can't go with. From `train`: the optimizer can't be sharded, or the
            checkpoint is of a training with another number of samples in a step.
    """

    loss_is_scaled_for_ga: bool | None
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        sharded: Literal[0, 1, 2] = 0,
        master_weights: bool | Literal["auto"] = "auto",
        **kwargs: Any,
    ) -> None:
        if isinstance(sharded, bool) or sharded not in (0, 1, 2):
            raise InvalidUsage(
                f"Trainer(sharded={sharded!r}) is not possible: it must be 1, which shards the "
                "optimizer's state, 2, which shards gradients, too, or 0."
            )
        if master_weights != "auto" and not sharded:
            raise InvalidUsage(
                f"Trainer(master_weights={master_weights!r}) is of a sharded optimizer, and the "
                "optimizer is not sharded: leave it out, or give sharded=1 or 2."
            )
        self._stage, self._master_weights = sharded, master_weights
        _warn_of_another_backend()
        super().__init__(*args, **kwargs)
        if sharded:
            self._refuse_beside_sharding()
        self.add_callback(GlobalBatch())

    def _refuse_beside_sharding(self) -> None:
        for name, reason in (
            ("auto_find_batch_size", "wraps the model anew, and the optimizer can't go with it"),
            ("save_on_each_node", "saves in several processes, and one has the whole state"),
        ):
            if getattr(self.args, name):
                raise InvalidUsage(
                    f"Trainer(sharded={self._stage}) can't go with {name}=True, which {reason}: "
                    "leave one of the two out."
                )

    def create_accelerator_and_postprocess(self) -> None:
        """Transformers' own, with pydist's Accelerator."""
        kind: Any = _TrainersAccelerator
        if self._stage:
            kind = functools.partial(_ShardingAccelerator, shard=self._sharded)
        # The losses are scaled here, or weighted in `training_step`.
        ours = functools.partial(kind, weights_uneven_batches=False)
        with _making_accelerators(ours):
            super().create_accelerator_and_postprocess()

    def _sharded(self, optimizer: Any) -> Any:
        schedulers = [] if self.lr_scheduler is None else [self.lr_scheduler]
        caller = f"Trainer(sharded={self._stage})"
        made = shard(
            [optimizer],
            schedulers,
            caller=caller,
            otherwise="leave out sharded=",
            stage=self._stage,
            master_weights=self._master_weights,
        )
        return made[0]

    @contextlib.contextmanager
    def _saving_whole_state(self) -> Iterator[None]:
        """Has the whole state of a sharded optimizer saved inside. Every process enters it."""
        optimizer = self.optimizer
        is_prepared = isinstance(optimizer, AcceleratedOptimizer)
        whole = whole_state(optimizer.optimizer if is_prepared else optimizer)
        if whole is None:
            yield
            return
        self.optimizer = _Saved(whole)
        try:
            yield
        finally:
            self.optimizer = optimizer

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Transformers' own, with the whole state of a sharded optimizer."""
        with self._saving_whole_state():
            super()._save_optimizer_and_scheduler(output_dir)

    def _tune_save_checkpoint(self, checkpoint_dir: str) -> None:
        """Transformers' own under Ray Tune, with the whole state of a sharded optimizer."""
        with self._saving_whole_state():
            super()._tune_save_checkpoint(checkpoint_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Transformers' own; the whole state of a sharded optimizer stays in the host's memory.

        Otherwise Transformers would load it onto each process's GPU, of which it may be too much.
        """
        if not self._stage or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        parts = {OPTIMIZER_NAME: self.optimizer, SCHEDULER_NAME: self.lr_scheduler}
        paths = {name: Path(checkpoint, name) for name in parts}
        if not all(path.is_file() for path in paths.values()):
            return  # Transformers goes on without, too, as after save_only_model=True
        check_torch_load_is_safe()
        for name, path in paths.items():
            parts[name].load_state_dict(torch.load(path, map_location="cpu", weights_only=True))

    def training_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Transformers' own, weighted where it does not count the tokens."""
        sees_to_it = (
            num_items_in_batch is not None
            or self.compute_loss_func is not None
            or self.loss_is_scaled_for_ga is not None
        )
        if sees_to_it or not isinstance(model, pydist.DataParallel):
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)
            return loss
        # The weights make one mean of all micro-batches: none is to be divided before.
        self.loss_is_scaled_for_ga = True
        try:
            with model.weighted(self._items(inputs)):
                loss = super().training_step(model, inputs, num_items_in_batch)
        finally:
            self.loss_is_scaled_for_ga = None
        steps: int = self.current_gradient_accumulation_steps
        return loss / steps

    def _items(self, inputs: dict[str, Any]) -> int:
        """How many items the loss of a micro-batch is the mean of."""
        if isinstance(shifted := inputs.get("shift_labels"), Tensor):
            return int(shifted.ne(_IGNORED).sum())
        labels = inputs.get("labels")
        if isinstance(labels, Tensor) and not labels.is_floating_point():
            # A causal model predicts all tokens but the first.
            if self._loss_shifts_labels and labels.ndim > 1:
                labels = labels[..., 1:]
            return int(labels.ne(_IGNORED).sum())
        return find_batch_size(inputs) or 1
