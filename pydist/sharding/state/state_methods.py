"""The methods of `pydist.ShardedOptimizer` about its state: to see it, to save and to load it."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pydist import _native
from pydist._torch import (
    run_load_state_dict_post_hooks,
    run_load_state_dict_pre_hooks,
    run_state_dict_post_hooks,
    run_state_dict_pre_hooks,
)
from pydist.errors import InvalidUsage
from pydist.sharding.parameter_groups import options_of
from pydist.sharding.placement import ShardedLayout
from pydist.sharding.state.ranges import ParameterState, ShardedState
from pydist.sharding.state.refused_saving import RanksPart, refuse_checkpoints
from pydist.sharding.state.segment_states import (
    ranges_of,
    require_state_of,
    state_of,
    take_over,
    waiting_state,
)
from pydist.sharding.state.shown_optimizer_state import StateOfShards
from pydist.sharding.state.torch_state_dict import (
    from_state_dict,
    from_unsharded,
    is_sharded,
    require_form,
    require_options_of,
    to_state_dict,
    to_unsharded,
    without_absent,
)
from pydist.sharding.step.element_wise import require_plain_options
from pydist.sharding.step.joint_step import JointStep
from pydist.sharding.step.shard_step import ShardStep


class StateMethods(Optimizer):
    """The part of `pydist.ShardedOptimizer` that shows, saves and loads the optimizer's state.

    Each rank has the state of its shard alone. The constructor makes what is declared here.
    """

    _class: type[Optimizer]
    _communicator: _native.Communicator
    _is_ready: bool
    _joint: JointStep
    _layout: ShardedLayout
    _shard_step: ShardStep
    _state: StateOfShards
    # State that was loaded for parameters which have no place yet, because they are frozen.
    _waiting: dict[int, ParameterState]

    @property  # type: ignore[override]
    def state(self) -> StateOfShards:
        """By parameter, what this rank has of the optimizer's state. Talks to nobody.

        For what walks the state of any optimizer: a mapping of the class's own names to tensors of
        one dimension, the elements that this rank's shard has of the parameter, and to numbers that
        are the same for all elements, such as `step`. What changes a tensor in place changes the
        shard. Parameters that are wholly on other ranks are not in it. In a world of one, tensors
        have the parameters' shapes.

        Setting a value takes a tensor of the shard's size, or of the parameter's, of which this
        rank takes its part. What would remove or copy state, or save this rank's part for all of
        it, raises InvalidUsage, but in a world of one.
        """
        self._shard_step.join()
        return self._state

    @state.setter
    def state(self, state: Any) -> None:
        if self._is_ready:
            self._shard_step.join()
            self._state.assign(state)

    def sharded_state(self) -> ShardedState:
        """This rank's part of the state: ranges of parameters, by name. Talks to nobody.

        It is of what a `pydist.DataParallel` model has now of the parameters, under its present
        names: layers may have been inserted or replaced. What the model has no more is left out,
        as in the model's own state.

        The tensors are the optimizer's own memory, not copies. The parts of all ranks, in any
        order, are the whole: `ShardedState.merged` puts parts together, `load_sharded_state` takes
        any that cover what the rank needs, whatever ranks and stage they come from.

        With `delayed=True` it waits for the step that is under way, and has what that makes; the
        parameters have it once all ranks call `finish()`.
        """
        self._joint.require_sound()
        self._shard_step.join()
        self._shard_step.arrive()
        names = self._layout.named()
        return state_of(self._layout, names, self._named_groups(), self._waiting)

    def ranges(self) -> dict[str, tuple[tuple[int, ...], list[tuple[int, int]]]]:
        """The parts of a state that `load_sharded_state` needs on this rank. Talks to nobody.

        Returns:
            By the parameters' names, as in `sharded_state()`: the order of dimensions, as in
            `ParameterState`, and ranges of elements. All of a parameter that has no place yet,
            because it is frozen.
        """
        self._joint.require_sound()
        return ranges_of(self._layout, self._layout.named())

    def load_sharded_state(self, state: ShardedState) -> None:
        """Takes over a state, by the names of the parameters. Talks to nobody.

        What the model has no more keeps the state that it has.

        With `delayed=True`, all ranks call `finish()` first: the values of a step that is under way
        reach the parameters later otherwise.

        Args:
            state: Its ranges cover what this rank's shard has of each parameter; what is beside
                that is not looked at. Copied.

        Raises:
            InvalidUsage: Parameters or groups are not those of this optimizer, elements of the
                shard are missing, values can't be cut for it (`pydist.save` says the same), or
                options are not supported. Nothing has changed.
        """
        self._joint.require_sound()
        names = self._layout.named()
        matching = require_state_of(self._layout, names, self._named_groups(), state)
        for group in state.groups:
            require_plain_options(group)
        waiting = waiting_state(self._layout, names, state)
        self._shard_step.join()
        self._shard_step.arrive()
        self._state.note_state()
        for own, loaded in matching:
            self.param_groups[own].update(copy.deepcopy(options_of(state.groups[loaded])))
        self._shard_step.forget_states()
        states = {index: state.parameters[name] for index, name in names.items()}
        take_over(states, self._layout.buckets)
        for index in self._waiting.keys() & names.keys():
            del self._waiting[index]
        self._waiting.update(waiting)

    def _named_groups(self) -> list[dict[str, Any]]:
        return [
            {**options_of(group), "params": list(named)}
            for group, named in zip(self.param_groups, self.named(), strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, in the form of torch's optimizers. Talks to nobody.

        As in any optimizer, "param_groups" has the options and the parameters' numbers, and
        "state" is by number, counted over what the model has of them, as in `sharded_state()`. What
        is there is a list of ranges: (begin, end, values), as in
        `sharded_state()`, whose shapes and orders of dimensions are in "parameters" with the
        names. It is of use to `load_state_dict` on the same rank of as many, with the same buckets
        (`bucket_cap_mb=`); what `pydist.save` keeps loads anywhere. In a world of one it is what
        `optimizer_class` has for whole parameters, and a float32 copy of one is "master".

        Raises:
            InvalidUsage: torch.distributed.checkpoint calls, which would keep one rank's for all.
        """
        rank, size = self._communicator.rank, self._communicator.size
        if size > 1:
            refuse_checkpoints()
        run_state_dict_pre_hooks(self)
        local = self.sharded_state()
        return run_state_dict_post_hooks(
            self,
            to_unsharded(local) if size == 1 else to_state_dict(local, RanksPart(rank, size)),
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes over a `state_dict()`, or one of an unsharded optimizer of the class. Copies it.

        Args:
            state_dict: This rank's own, from as many ranks with the same buckets; or one of the
                wrapped class, from torch, whole: every rank takes its part.

        Raises:
            InvalidUsage: As for `load_sharded_state`; or it is, by the options of its groups, of
                another class. Nothing has changed.
        """
        state_dict = run_load_state_dict_pre_hooks(self, state_dict)
        require_form(state_dict)
        for group in state_dict["param_groups"]:
            require_options_of(self._class.__qualname__, self, group)
        if is_sharded(state_dict):
            state = from_state_dict(state_dict)
        else:
            named = [item for group in self.named() for item in group.items()]
            present = {id(parameter) for _, parameter in named}
            of_present = without_absent(state_dict, self.param_groups, present)
            state = from_unsharded(of_present, named)
        self.load_sharded_state(state)
        run_load_state_dict_post_hooks(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise InvalidUsage(
            "a pydist.ShardedOptimizer can't be copied or pickled: parameters and gradients are "
            "in memory of its ranks' group; pydist.save keeps its state, and state_dict() is this "
            "rank's part of it"
        )

    def named(self) -> list[dict[str, Tensor]]:
        """The parameters that `sharded_state()` is of, by name, group by group."""
        names, indices = self._layout.named(), self._layout.indices
        return [
            {names[i]: p for p in group["params"] if (i := indices[id(p)]) in names}
            for group in self.param_groups
        ]
