"""A stage of a pipeline whose replicas average once a step."""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch.distributed.pipelining as torch_pipelining

from pydist._torch import uncompiled
from pydist.errors import InvalidUsage
from pydist.job import groups
from pydist.parallel.checks.replica_check import check_same
from pydist.parallel.nested_wrappers import parts_by_path
from pydist.parallel.wrapper import DataParallel
from pydist.pipelining.wrapped_errors import unwrapped_errors

if TYPE_CHECKING:
    _Stage = torch_pipelining.PipelineStage
else:
    _Stage = object


class ReplicatedStage(_Stage):
    """What averages once a step, on top of a class of stages of torch's.

    Note [When a stage averages]: forwards of all micro-batches but the last one run under
    `no_sync()`, so their backwards accumulate. The last backward averages what all have
    accumulated. It holds that average (`DataParallel.holding_average`), so that the schedule can
    send the input's gradient on, and `perform_reduce_grad`, which torch's schedules call after
    that, concludes it. Classes derived from `PipelineScheduleMulti` that take its
    `_step_microbatches` call `scale_grads` alone, before they send: there the average is waited for
    first.

    Note [Interrupted steps]: a process with one stage ends a step with its average, or with that
    of nothing: all messages of the step have come. Where it has several, an exception in between
    leaves messages of the other stages unreceived, and the next step would take them for its own.
    """

    # How many backwards of the step have run.
    _backwards: int = 0
    # The number of micro-batches that the replicas have compared.
    _compared: int | None = None
    # What gradients were divided by at the end of the last step.
    scaled_by: int | None = None
    # A step has run a forward, and its average has not come.
    _is_in_step: bool = False
    # See Note [Interrupted steps].
    _is_broken: bool = False

    @property
    def replicated(self) -> DataParallel | None:
        """The module, if its gradients are averaged over replicas by pydist."""
        module = uncompiled(self.submod)
        return module if isinstance(module, DataParallel) else None

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Runs a micro-batch's forward, which decides whether its backward averages."""
        self._require_whole_steps()
        model = self.replicated
        self._is_in_step = self.has_backward and model is not None
        if self.chunks != self._compared:
            self._look_at_the_module(model)
            self._compared = self.chunks
        if model is None or not self.has_backward or self._is_last(fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        model.expect_any_order()
        with model.no_sync():
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def _look_at_the_module(self, model: DataParallel | None) -> None:
        """Before the first step: all replicas do the same, and nothing else averages."""
        if model is not None:
            check_same(
                groups.communicator_of(model.process_group, "process_group"),
                f"the schedule of stage {self.stage_index}",
                [f"n_microbatches={self.chunks}"],
                "give the schedules of all replicas the same n_microbatches",
            )
            return
        for name, part in parts_by_path(self.submod):
            if isinstance(part, DataParallel) and any(p.requires_grad for p in part.parameters()):
                raise InvalidUsage(
                    f"the module of stage {self.stage_index} has a pydist.DataParallel in it, at "
                    f"{name}, which would average at every micro-batch: wrap the whole module of "
                    "the stage"
                )

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> Any:
        """Runs a micro-batch's backward, whole."""
        model = self.replicated
        if model is None:
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if model.weight_of_backward is not None:
            raise InvalidUsage(
                "a schedule steps within model.weighted(), and divides gradients by the number of "
                "micro-batches besides: use pydist.pipelining.WeightedLoss"
            )
        is_last = self._is_last(bwd_chunk_id)
        if is_last != self._is_last(self._backwards):
            raise InvalidUsage(
                f"the schedule runs the backward of micro-batch {bwd_chunk_id} of {self.chunks} as "
                f"number {self._backwards}: gradients are averaged in that of the last one, which "
                "must come last"
            )
        self._backwards = 0 if is_last else self._backwards + 1
        holding = model.holding_average() if is_last else contextlib.nullcontext()
        with unwrapped_errors(), holding:
            return super().backward_one_chunk(bwd_chunk_id, loss, True, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        """Nothing: `backward_one_chunk` has done it."""
        if self.replicated is None:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Waits for the replicas' averages, after the step's last backward. Then scales them."""
        self._conclude_average()
        super().perform_reduce_grad(grad_scale_factor)

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Divides the gradients of a step, as torch's stage does, and notes by what."""
        self._conclude_average()  # where a schedule calls this alone
        self.scaled_by = grad_scale_factor
        super().scale_grads(grad_scale_factor)

    def _conclude_average(self) -> None:
        if (model := self.replicated) is not None:
            model.conclude_average()
        self._is_in_step = False

    def _is_last(self, chunk_id: int) -> bool:
        return self.chunks is not None and chunk_id == self.chunks - 1

    def clear_runtime_states(self) -> None:
        """Forgets what an interrupted step has left."""
        self._backwards = 0
        if (model := self.replicated) is not None:
            model.give_up_average()
        self._is_broken = self._is_in_step and self.num_stages > self.group_size
        super().clear_runtime_states()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> Any:
        """Receives a micro-batch, if the step before this one has left nothing to receive."""
        self._require_whole_steps()
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def _require_whole_steps(self) -> None:
        """Not where the step begins: the other stages of this process give up averages first."""
        if self._is_broken:
            raise InvalidUsage(
                f"the last step of stage {self.stage_index} was interrupted before its gradients "
                "were averaged. This process has several stages, so messages of that step may be "
                "under way still, and this step would take them for its own: end the job and go on "
                "from a checkpoint, or make new groups for the stages of each replica, new stages "
                "and a new schedule"
            )


class PipelineStage(ReplicatedStage, torch_pipelining.PipelineStage):
    """torch's stage, for a module in a `pydist.DataParallel` over the stage's replicas.

    Takes torch's arguments but `dw_builder`, and works with torch's schedules, except for
    ScheduleLoopedBFS, which reverses the backwards. A step takes one round of the replicas'
    all-reduces. It begins as the backward of the last micro-batch runs, and its end is waited for
    in `perform_reduce_grad`, which torch's schedules call after they have sent the input's gradient
    to the stage before this one. A schedule that calls `scale_grads` before it sends waits there.

    Zero-bubble schedules divide a backward in two, of which neither sets off the hooks of
    gradients. This stage does all of it in the first part, so their numbers are right, and their
    bubbles those of 1F1B.

    A module in no `pydist.DataParallel` is treated as torch's stage treats it: so is one without
    parameters that train, which there is nothing to average of. `torch.compile` may be around the
    `pydist.DataParallel`, or around the module in it, with inductor as with other backends.

    Before the first step torch may run the module once for the shapes of its outputs; not where the
    stage is given `input_args` and `output_args`. Running statistics of BatchNorm take that forward
    up, except with a torch that puts the module's buffers back after it; up to 2.13, none does.

    Raises:
        InvalidUsage: A `dw_builder` is given for a module in a `pydist.DataParallel`. While a
            schedule runs: it takes the micro-batches' backwards in an order in which the last one
            does not come last, or it steps within `model.weighted()`, for which there is
            `WeightedLoss`; or a part of the module is in a `pydist.DataParallel`; or this process
            has several stages, and its last step was interrupted by an exception.
        Mismatch: While a schedule runs: replicas have different numbers of micro-batches.
        PeerLost: While a schedule runs: a rank has died or left. Torch's stage would make a
            RuntimeError of what its backward raises; errors of pydist's come as themselves.

    Example:
        >>> from pydist.pipelining import PipelineStage
        >>> model = pydist.DataParallel(part, process_group=replicas)  # doctest: +SKIP
        >>> stage = PipelineStage(model, 0, 2, device, group=chain)  # doctest: +SKIP
    """

    @functools.wraps(torch_pipelining.PipelineStage.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.replicated is not None and self.dw_builder is not None:
            raise InvalidUsage(
                f"stage {self.stage_index} has a dw_builder, and its module is in a "
                "pydist.DataParallel: gradients of weights that come after the backward would not "
                "be averaged, so leave dw_builder out"
            )
