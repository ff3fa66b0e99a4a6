"""What strategies on pydist do otherwise than Lightning's `DDPStrategy`, whose methods these are.

The classes stand before Lightning's own, of which each of its packages has one: `register` joins
them.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

import pydist
from pydist.errors import InvalidUsage, Mismatch, PeerLost, Timeout
from pydist.integrations.lightning.loaders import (
    batches_of_ranks,
    counted_by_fabric,
    marking,
    shared,
    stand_in,
)
from pydist.integrations.lightning.reductions import Logged, log, reduce, reduce_logged
from pydist.parallel.wrapper_parts.forward import watch_outputs

# Lightning's names of where a value is logged that is of one batch of an evaluation.
_WITHIN_EVALUATION = frozenset(
    hook.format(kind)
    for kind in ("validation", "test")
    for hook in ("{}_step", "on_{}_batch_start", "on_{}_batch_end")
)

# Lightning's class that comes next, for type checkers.
_Base: Any = object


def _wrap(module: nn.Module, device_ids: list[int] | None, arguments: dict[str, Any]) -> nn.Module:
    return pydist.DataParallel(module, device_ids=device_ids, **arguments)


class _JoinsPydist(_Base):
    """What the strategies of Trainer and of Fabric have in common."""

    def _get_process_group_backend(self) -> str:
        given = self._process_group_backend
        if given not in (None, "pydist"):
            raise InvalidUsage(
                f"process_group_backend={given!r} is not possible with strategy 'pydist', whose "
                "process group is pydist's own: leave it out, and choose what pydist runs on by "
                "PYDIST_BACKEND=native, gloo or nccl."
            )
        return "pydist"

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return marking(super().distributed_sampler_kwargs)


class TrainerMethods(_JoinsPydist):
    """Of a strategy for `Trainer`."""

    model: Any
    _is_in_training_step = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # DDP's own switches averaging off at the end of a forward in which backwards have run:
        # with optimization by hand, whose training step runs inside of the wrapper's forward.
        self._forward_redirection = self._redirection_class()
        # Those of the trainer's loaders.
        self._samplers: list[pydist.DistributedSampler] = []
        # Loaders that stand in for samples which this rank has not, and the number of the loader
        # that the latest batch is from.
        self._stand_ins: list[pydist.PreparedLoader[Any]] = []
        self._loader_index = 0
        # What to say of an evaluation in which ranks have unequally many batches.
        self._uneven = ""

    def connect(self, model: Any) -> None:
        super().connect(model)
        model.log = functools.partial(log, model)

    def setup_distributed(self) -> None:
        super().setup_distributed()
        pydist.init()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return _wrap(model, self.determine_ddp_device_ids(), self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        hook = self._ddp_comm_hook
        if hook is None:
            return
        if self._ddp_comm_wrapper is not None:
            hook = self._ddp_comm_wrapper(hook)
        self.model.register_comm_hook(self._ddp_comm_state, hook)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._is_in_training_step = True
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._is_in_training_step = False

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Lets a backward average that optimization by hand runs inside of the forward."""
        wrapper = self.model
        by_hand = not self.lightning_module.automatic_optimization
        if by_hand and isinstance(wrapper, pydist.DataParallel):
            watch_outputs(weakref.ref(wrapper), closure_loss)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if isinstance(self.model, pydist.DataParallel):
            with self.model.no_sync():
                yield
        else:
            yield

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if isinstance(group, Logged):
            # A rank that logs less goes on to the backward from a training step, and from anywhere
            # else to an operation of Lightning's, in all ranks' group. It is found at once where
            # both are in one group.
            wrapper = self.model if self._is_in_training_step else None
            try:
                with self._telling_of_uneven_batches():
                    return reduce_logged(tensor, group, reduce_op, wrapper)
            except Mismatch as error:
                said = f"{error} This rank was in self.log({group.name!r}, ..., sync_dist=True)."
                raise Mismatch(said, **error.blame) from error
        return reduce(tensor, group, reduce_op)

    def process_dataloader(self, dataloader: object) -> object:
        trainer = self.lightning_module.trainer
        loader = shared(dataloader, pads=trainer.training)
        if not isinstance(loader, pydist.PreparedLoader):
            return loader
        if trainer.evaluating or trainer.sanity_checking:
            most, least = batches_of_ranks(loader)
            if most != least:
                self._uneven = (
                    "In this evaluation ranks have unequally many batches, from "
                    f"{least} to {most}: call nothing for each batch that takes all ranks "
                    "(self.all_gather, self.log(..., sync_dist=True, on_step=True)), but at the "
                    "end of the epoch."
                )
            if len(loader) == 0:
                loader = stand_in(loader)
                self._stand_ins.append(loader)
        # The trainer says epochs. A loader that is shorter than others comes to its end more often.
        sampler = loader.distributed_sampler
        sampler.repeats_epoch = True
        self._samplers.append(sampler)
        return loader

    @contextlib.contextmanager
    def _telling_of_uneven_batches(self) -> Iterator[None]:
        """Adds to an error of ranks that are out of step what may have brought them there."""
        try:
            yield
        except (Mismatch, PeerLost, Timeout) as error:
            trainer = self.lightning_module.trainer
            has_died = isinstance(error, PeerLost) and "has left" not in (error.cause or "")
            if not self._uneven or trainer.training or has_died:
                raise
            raise type(error)(f"{error} {self._uneven}", **error.blame) from error

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._telling_of_uneven_batches():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._telling_of_uneven_batches():
            return super().test_step(*args, **kwargs)

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        self._loader_index = dataloader_idx
        return super().batch_to_device(batch, device, dataloader_idx)

    def stands_in(self) -> bool:
        """Whether what is logged now is of a sample that another rank has as well."""
        model = self.lightning_module
        if not self._stand_ins or model._current_fx_name not in _WITHIN_EVALUATION:
            return False
        combined = model.trainer._evaluation_loop._combined_loader
        loaders = combined.flattened
        if len(loaders) > 1 and combined._mode != "sequential":
            raise InvalidUsage(
                f"rank {pydist.rank()} has no samples of one of the {len(loaders)} loaders that "
                f"CombinedLoader(mode={combined._mode!r}) evaluates together, so what is logged of "
                "a batch of all can't be weighed by its samples: give that loader as many samples "
                "as there are ranks, or evaluate one loader after the other (mode='sequential')."
            )
        return any(loaders[self._loader_index] is each for each in self._stand_ins)

    def teardown(self) -> None:
        if isinstance(self.model, pydist.DataParallel):
            self.model = self.lightning_module
        # The model goes on without pydist, and is saved and copied as it came.
        if self.lightning_module is not None:
            self.lightning_module.__dict__.pop("log", None)
        # A loader that the script has prepared goes on by itself again.
        for sampler in self._samplers:
            sampler.repeats_epoch = False
        self._samplers.clear()
        self._stand_ins.clear()
        self._uneven = ""
        super().teardown()


class _SyncControl(_Base):
    """Of Fabric, for `fabric.no_backward_sync`."""

    def no_backward_sync(
        self, module: nn.Module, enabled: bool
    ) -> contextlib.AbstractContextManager[None]:
        if not isinstance(module, pydist.DataParallel):
            raise InvalidUsage(
                f"fabric.no_backward_sync got a {type(module).__name__}, which is not wrapped in "
                "pydist.DataParallel: give it what fabric.setup has returned."
            )
        return module.no_sync(enabled)


class FabricMethods(_JoinsPydist):
    """Of a strategy for `Fabric`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._backward_sync_control = _SyncControl()
        # Of the modules that were set up; Fabric's own wrappers hide them.
        self._wrappers: list[weakref.ref[nn.Module]] = []

    def _setup_distributed(self) -> None:
        super()._setup_distributed()
        pydist.init()

    def setup_module(self, module: nn.Module) -> nn.Module:
        wrapper = _wrap(module, self._determine_ddp_device_ids(), self._ddp_kwargs)
        self._wrappers = [each for each in self._wrappers if each() is not None]
        self._wrappers.append(weakref.ref(wrapper))
        return wrapper

    def weighted(
        self, module: nn.Module, weight: float | Tensor
    ) -> contextlib.AbstractContextManager[None]:
        """Lets backwards inside count for `weight`; see `pydist.DataParallel.weighted`.

        Args:
            module: What `fabric.setup` has returned.
            weight: Of this rank's loss in the mean, such as the number of its samples.

        Raises:
            InvalidUsage: It is another module; and what `weighted` refuses.

        Example::

            with fabric.strategy.weighted(model, len(inputs)):
                fabric.backward(loss)
        """
        original = getattr(module, "module", None)
        for each in self._wrappers:
            wrapper = each()
            if isinstance(wrapper, pydist.DataParallel) and wrapper.module is original:
                return wrapper.weighted(weight)
        raise InvalidUsage(
            f"fabric.strategy.weighted got a {type(module).__name__} that this Fabric has not set "
            "up: give it what fabric.setup has returned."
        )

    def process_dataloader(self, dataloader: object) -> object:
        return counted_by_fabric(shared(dataloader, pads=True))

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return reduce(tensor, group, reduce_op)
