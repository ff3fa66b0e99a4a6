"""How a wrapper meets the other ranks.

Note [Joining]
A wrapper is made in two parts. `_wrap` talks to nobody; from then on the wrapper stands for the
module. `_join` meets the other ranks, and makes what averages: a communicator, memory for
gradients. The constructor does both. A copy (`copy.deepcopy`) is only wrapped, and joins when it is
to train: at the first forward with gradients enabled that a parameter requires, or when a method is
called that needs all ranks. So copies that never train, such as averages of the weights, cost
nothing, and one rank alone may make them.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from pydist._torch import runs_uncompiled_throughout
from pydist.errors import Timeout
from pydist.job import groups, membership
from pydist.parallel.buffers.buffer_sync import BufferSync
from pydist.parallel.checks.replica_check import check_same, copy_from, facts_of
from pydist.parallel.checks.step_guard import guard_steps
from pydist.parallel.like_torch.torch_arguments import input_device_of
from pydist.parallel.nested_wrappers import look_at_torchs_wrappers
from pydist.parallel.reducer import make_reducer, require_reducible
from pydist.parallel.sync_batch_norm import talk_apart
from pydist.parallel.trained_parameters import TrainedParameters, require_trainable
from pydist.parallel.wrapper_parts.buckets import planned_by
from pydist.parallel.wrapper_parts.communication_hooks import CommunicationHooks
from pydist.parallel.wrapper_parts.held_average import HeldAverage
from pydist.parallel.wrapper_parts.retirement import Retirement

if TYPE_CHECKING:
    from pydist import _native


class Meeting(CommunicationHooks, Retirement, HeldAverage):
    """The part of `pydist.DataParallel` that meets the other ranks; see Note [Joining]."""

    @runs_uncompiled_throughout
    def _join(self, *, with_parameters: bool, with_buffers: bool) -> None:
        """Meets the other ranks, which all call it. Where it raises, nothing has changed.

        Args:
            with_parameters: Whether to copy rank 0's parameters.
            with_buffers: Whether to copy rank 0's buffers.
        """
        settings, local = self._settings, self._local
        local.look_again()
        require_trainable(local)
        input_device = input_device_of(local, settings.device_ids, settings.output_device)
        if settings.replicas is not None:
            settings.replicas.require_copyable(local.module)
        membership.init()
        # A group of its own: the user's collectives can't be taken for these, or these for theirs.
        parent = groups.communicator_of(settings.process_group, "process_group")
        communicator = groups.split(parent, range(parent.size))
        talk_apart(local.module, settings.process_group, communicator)
        averages_itself = self._averages_itself
        facts = [*settings.facts(), f"average_bucket of its own={averages_itself}"]
        check_same(communicator, "pydist.DataParallel's setting", facts)
        check_same(communicator, "the module", facts_of(local))
        require_reducible(communicator, local, settings.reduction, settings.wire_dtype)
        copy_from(
            communicator, 0, local, with_parameters=with_parameters, with_buffers=with_buffers
        )
        trained = TrainedParameters(local)
        trained.add_all()
        buffer_sync = BufferSync(communicator, local) if settings.copies_buffers else None
        itself = weakref.ref(self)
        reducer = make_reducer(
            communicator,
            trained.known,
            lambda *arguments: planned_by(itself(), settings.caps_bytes, *arguments),
            buffer_sync,
            sums=settings.reduction == "sum",
            wire_dtype=settings.wire_dtype,
            measures_link=not settings.caps_bytes,
            gradients_are_views=settings.gradients_are_views,
            rank=membership.rank(),
        )
        reducer.enabled = self._averages_when_joined
        if buffer_sync is not None:
            buffer_sync.changes.reducer = weakref.ref(reducer)
        if averages_itself:
            self._let_itself_average(reducer)
        self._take_up(trained.known, "wrapped anew")
        self._communicator, self._input_device = communicator, input_device
        self._trained, self._buffer_sync = trained, buffer_sync
        self._working_reducer = reducer
        self._give_up_when_gone(reducer, communicator)
        self._finite_check.watch(trained.known, membership.rank(), reducer)
        guard_steps()
        look_at_torchs_wrappers()

    def require_joined(self) -> None:
        """Lets a copy join, if it has not yet. All ranks call it together."""
        if not self.has_joined:
            try:
                self._join(with_parameters=False, with_buffers=self._settings.copies_buffers)
            except Timeout as error:
                raise Timeout(
                    "a copy of a pydist.DataParallel joins the other ranks at its first forward "
                    "with gradients enabled, which all ranks call, and some did not come. To "
                    f"evaluate it on some ranks alone, use torch.no_grad(). ({error})",
                    **error.blame,
                ) from error

    def communicator_to_split(self) -> _native.Communicator:
        """One of the ranks that train the model, also before a copy has joined them."""
        if self.has_joined:
            return self._communicator
        membership.init()
        return groups.communicator_of(self._settings.process_group)

    def _join_after_forward(self) -> None:
        """Lets a copy join of which a method has run, whose graph may need its buffers."""
        self._join(with_parameters=False, with_buffers=False)
        if self._buffer_sync is not None:
            self._buffer_sync.forget()
