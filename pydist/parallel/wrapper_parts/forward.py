"""What happens around a forward of a wrapped module."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from pydist._torch import StandIn, runs_uncompiled, runs_uncompiled_throughout, tree_map_only
from pydist.parallel.compiled_graphs import graphs_cut_at
from pydist.parallel.like_torch.torchs_stages import warn_of_torchs_stage
from pydist.parallel.nested_wrappers import refuse_active_torch
from pydist.parallel.reducer import outputs_with_graph
from pydist.parallel.wrapper_parts.meeting import Meeting


class Forward(Meeting, StandIn):
    """The part of `pydist.DataParallel` that runs the module."""

    # Of what this calls, dynamo is to compile the module's forward, and nothing of ours.
    @runs_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward. Talks to no other rank, but for `check_every=`."""
        args, kwargs, during = self._begin_forward(args, kwargs)
        with during:
            replicas = self._settings.replicas
            if replicas is not None:
                outputs = replicas.run(self.module, args, kwargs)
            else:
                outputs = self.module(*args, **kwargs)
        watch_outputs(weakref.ref(self), outputs)
        return outputs

    @runs_uncompiled_throughout
    def _begin_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], contextlib.ExitStack]:
        """What comes before the module's forward: its arguments, and what it is to run in."""
        self.require_working()
        refuse_active_torch(self)
        warn_of_torchs_stage()
        self._forwards += 1
        # Not in an evaluation, which one rank may do alone.
        trains = torch.is_grad_enabled()
        if trains and (joining := self._trained.joined()):
            if self.has_joined:
                self._add(joining)
            else:
                self.require_joined()
        replicas = self._settings.replicas
        for owner in self.shard_owners():
            owner.finish() if replicas is not None else owner.before_forward(self.module)
        if self._input_device is not None:
            # A packed sequence moves whole: its sizes of batches stay on the CPU.
            args, kwargs = tree_map_only(
                (Tensor, PackedSequence),
                lambda value: value.to(self._input_device),
                (args, kwargs),
                is_leaf=lambda value: isinstance(value, PackedSequence),
            )
        reducer = self._working_reducer
        if reducer is not None:
            self._weights.look_back(reducer)
            reducer.prepare_forward(trains and self.module.training)
            if trains and self._buffer_sync is not None:
                self._buffer_sync.before_forward(averages=reducer.enabled)
            self._let_sentinel_look(averages=trains and reducer.enabled)
        with contextlib.ExitStack() as during:
            during.enter_context(graphs_cut_at(self._settings.graph_cap_bytes))
            for owner in self.shard_owners():
                during.enter_context(owner.during_forward())
            if reducer is not None and self._buffer_sync is not None and not trains:
                during.enter_context(self._buffer_sync.during_forward_without_gradients())
            return args, kwargs, during.pop_all()

    def _let_sentinel_look(self, *, averages: bool) -> None:
        """Compares the models of the ranks before a forward, if that is asked for and due."""
        sentinel = self._sentinel
        if not averages:
            sentinel.note_other_forward(self.module.training)
            return
        if sentinel.is_due():
            for owner in self.shard_owners():
                owner.finish()
        has_buffers = self._buffer_sync is not None
        sentinel.before_forward(self._communicator, self._local, has_buffers)


@runs_uncompiled_throughout
def watch_outputs(wrapper: weakref.ref[Any], outputs: Any) -> None:
    """Lets the backward that comes from the outputs of a forward average, or only accumulate."""
    watching: Forward | None = wrapper()
    if watching is None or watching.is_retired or not torch.is_grad_enabled():
        return
    tensors = list(outputs_with_graph(outputs))
    if not watching.has_joined:
        if not tensors or not watching._trained.joined():
            return  # not to be trained
        watching._join_after_forward()
    reducer = watching._reducer
    watching._finite_check.after_forward(averages=reducer.enabled)
    reducer.note_forward()
    for tensor in tensors:
        reducer.watch(tensor)
