"""What the optimizers of segments keep, as parts of the state of whole parameters, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.sharding.buckets import Bucket, Segment
from pydist.sharding.placement import ShardedLayout
from pydist.sharding.state.ranges import (
    MASTER,
    ParameterState,
    ShardedState,
    StateRange,
    cut_out,
    is_per_element,
    matching_groups,
    require_divisible,
    require_elements,
)


def state_of(
    layout: ShardedLayout,
    names: Mapping[int, str],
    groups: list[dict[str, Any]],
    waiting: Mapping[int, ParameterState],
) -> ShardedState:
    """This rank's part of the state; shares memory with it.

    Args:
        layout: The parameters.
        names: Of those that it is the state of, by number.
        groups: Options, and names of parameters in "params".
        waiting: The whole state of parameters that have no place yet, by number.
    """
    states = {
        index: waiting.get(index) or ParameterState(tuple(p.shape), tuple(range(p.dim())))
        for index in names
        for p in [layout.parameters[index]]
    }
    for bucket in layout.buckets:
        for member in bucket.members:
            if member.index in names:
                states[member.index].dims = member.dims
                states[member.index].is_part = not bucket.is_own
                states[member.index].is_own = bucket.is_own
        for segment in bucket.segments:
            if segment.member.index not in names:
                continue
            assert bucket.optimizer is not None
            values = dict(bucket.optimizer.state.get(segment.updated, {}))
            if segment.has_master:
                values[MASTER] = segment.updated
            state = states[segment.member.index]
            state.ranges.append(StateRange(segment.begin, segment.end, values))
    return ShardedState({names[index]: state for index, state in states.items()}, groups)


def ranges_of(
    layout: ShardedLayout, names: Mapping[int, str]
) -> dict[str, tuple[tuple[int, ...], list[tuple[int, int]]]]:
    """The parts of a state that this rank needs: see `ShardedOptimizer.ranges`."""
    needed: dict[int, tuple[tuple[int, ...], list[tuple[int, int]]]] = {}
    for index, p in enumerate(layout.parameters):
        needed[index] = (tuple(range(p.dim())), [(0, p.numel())])
    for bucket in layout.buckets:
        for member in bucket.members:
            needed[member.index] = (member.dims, [])
        for segment in bucket.segments:
            needed[segment.member.index][1].append((segment.begin, segment.end))
    return {name: needed[index] for index, name in names.items()}


def require_state_of(
    layout: ShardedLayout,
    names: Mapping[int, str],
    groups: list[dict[str, Any]],
    state: ShardedState,
) -> list[tuple[int, int]]:
    """Raises InvalidUsage where a state is of other parameters or groups, or lacks elements.

    Returns:
        Which of the optimizer's groups takes the options of which of the state's.
    """
    unknown = sorted(set(state.parameters) ^ set(names.values()))
    if unknown:
        whose = "the optimizer" if unknown[0] in state.parameters else "the state"
        raise InvalidUsage(
            f"a state of other parameters was loaded: {unknown[0]} is unknown to {whose}"
        )
    ours = [group["params"] for group in groups]
    theirs = [group["params"] for group in state.groups]
    matching = matching_groups(ours, theirs)
    if matching is None:
        raise InvalidUsage(
            f"a state of other parameter groups was loaded: {_lengths(theirs)} parameters, "
            f"where the optimizer has {_lengths(ours)}, or other ones"
        )
    for index, name in names.items():
        shape = tuple(layout.parameters[index].shape)
        if state.parameters[name].shape != shape:
            raise InvalidUsage(
                f"the state of parameter {name} is of {state.parameters[name].shape}, where "
                f"the parameter is {shape}"
            )
    for bucket in layout.buckets:
        for segment in bucket.segments:
            if segment.member.index in names:
                name = names[segment.member.index]
                known = state.parameters[name]
                require_elements(name, known, segment.member.dims, segment.begin, segment.end)
    return matching


def waiting_state(
    layout: ShardedLayout, names: Mapping[int, str], state: ShardedState
) -> dict[int, ParameterState]:
    """What a state has for parameters that have no place yet, by number: all of each. Copies it.

    Raises:
        InvalidUsage: It lacks elements of one, or can't be cut into shards.
    """
    placed = {member.index for bucket in layout.buckets for member in bucket.members}
    found = {}
    for index, name in names.items():
        known = state.parameters[name]
        if index in placed:
            continue
        values = cut_out(name, known, known.dims, 0, known.count)
        if values is not None:
            require_divisible(name, values, known.count)
            ranges = [StateRange(0, known.count, values)]
            found[index] = ParameterState(known.shape, known.dims, ranges)
    return found


def take_over(states: Mapping[int, ParameterState], buckets: Sequence[Bucket]) -> None:
    """Gives the segments of some buckets what there is for them, by number. Copies it."""
    with torch.no_grad():
        for bucket in buckets:
            if bucket.optimizer is None:
                continue
            for segment in bucket.segments:
                if (state := states.get(segment.member.index)) is not None:
                    _take_over_segment(state, bucket.optimizer, segment)


def _take_over_segment(state: ParameterState, optimizer: Optimizer, segment: Segment) -> None:
    member = segment.member
    values = cut_out(member.name, state, member.dims, segment.begin, segment.end)
    values = {} if values is None else values
    master = values.pop(MASTER, None)
    if segment.has_master:
        segment.updated.copy_(segment.values if master is None else master)
    count = segment.end - segment.begin
    group = next(
        g for g in optimizer.param_groups if any(p is segment.updated for p in g["params"])
    )
    own = optimizer.state[segment.updated]
    own.clear()
    for key, value in values.items():
        if not isinstance(value, Tensor):
            own[key] = value
            continue
        is_converted = is_per_element(value, count) and value.dtype.is_floating_point
        dtype = segment.updated.dtype if is_converted else value.dtype
        own[key] = value.to(_place_of(key, group, segment), dtype, copy=True)
    if not own:
        del optimizer.state[segment.updated]


def _place_of(key: str, group: dict[str, Any], segment: Segment) -> torch.device:
    """The device on which torch's optimizers put what they load: for some steps, the host."""
    is_for_host = key == "step" and not (group.get("fused") or group.get("capturable"))
    return torch.device("cpu") if is_for_host else segment.updated.device


def _lengths(names: list[list[str]]) -> str:
    return " and ".join(str(len(group)) for group in names) or "no"
