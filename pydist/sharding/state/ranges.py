"""The state of a sharded optimizer: ranges of parameters, by name. Nothing is keyed by rank.

A range is of the parameter as one row of elements: `parameter.permute(dims).reshape(-1)`, `dims`
being its dimensions in the order in which they lie in memory, the slowest first; (0, 1, ...) unless
it is transposed or in channels-last layout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.sharding.buckets import dense_strides, dims_in_memory, shaped

# The float32 copy of a 16-bit parameter, beside what the optimizer's class calls its own.
MASTER = "master"

# The state that torch's classes keep as one number for each parameter. By its shape alone, such a
# number would look like the state of a parameter without dimensions.
NUMBERS = {"step", "eta", "mu", "mu_product"}


@dataclass
class StateRange:
    """The state of some elements of a parameter.

    Attributes:
        begin: The first element.
        end: Behind the last one.
        values: By the name that the optimizer's class gives it: tensors of `end - begin` elements,
            which may be read when they are asked for, and numbers (or tensors of none) that are the
            same for all elements, such as `step`. Empty if there is none: the elements were never
            updated.
    """

    begin: int
    end: int
    values: Mapping[str, Any]


@dataclass
class ParameterState:
    """What is known of one parameter's state.

    Attributes:
        shape: Of the parameter.
        dims: How ranges are to be read; see above.
        ranges: In any order; of one rank, or of several.
        is_part: Whether elements that are in no range are some other rank's. Otherwise nothing was
            ever updated if there are no ranges.
        is_own: Whether the parameter is one rank's alone: another rank's of that name is another.
    """

    shape: tuple[int, ...]
    dims: tuple[int, ...]
    ranges: list[StateRange] = field(default_factory=list)
    is_part: bool = False
    is_own: bool = False

    @property
    def count(self) -> int:
        """Elements of the parameter."""
        return math.prod(self.shape)


@dataclass
class ShardedState:
    """The state of an optimizer, or of a part of it.

    Attributes:
        parameters: By the parameters' names.
        groups: The parameter groups: their options, with the names of their parameters in "params".
    """

    parameters: dict[str, ParameterState]
    groups: list[dict[str, Any]]

    @staticmethod
    def merged(states: Iterable[ShardedState]) -> ShardedState:
        """The parts of several ranks as one state; ranges share memory with theirs.

        Raises:
            InvalidUsage: They are of different parameters, or a rank has some that are its own.
        """
        states = list(states)
        own = [name for state in states for name, known in state.parameters.items() if known.is_own]
        if own and len(states) > 1:
            raise InvalidUsage(
                f"parameter {own[0]} is each rank's own, so the parts of several ranks are not one "
                "state: load each rank's own part there, or use pydist.save and pydist.load"
            )
        parameters: dict[str, ParameterState] = {}
        groups: list[dict[str, Any]] = []
        for state in states:
            groups = groups or state.groups
            for name, part in state.parameters.items():
                known = parameters.setdefault(name, ParameterState(part.shape, part.dims))
                if (known.shape, known.dims) != (part.shape, part.dims):
                    raise InvalidUsage(
                        f"the parts of the state of {name} are of {known.shape} in order "
                        f"{known.dims} and of {part.shape} in order {part.dims}"
                    )
                known.ranges += part.ranges
                known.is_part |= part.is_part
        return ShardedState(parameters, groups)


def matching_groups(
    ours: Sequence[Sequence[str]], theirs: Sequence[Sequence[str]]
) -> list[tuple[int, int]] | None:
    """Which groups of two optimizers are of the same parameters.

    A group that has no parameter left may be missing on either side: whoever builds the model
    without what was taken out of it has no group for that.

    Returns:
        Pairs of their numbers; None if the groups are of other parameters.
    """
    if ours == theirs:
        return [(number, number) for number in range(len(ours))]
    a, b = ([n for n, group in enumerate(side) if group] for side in (ours, theirs))
    if [ours[n] for n in a] != [theirs[n] for n in b]:
        return None
    return list(zip(a, b, strict=True))


def cut_out(
    name: str, state: ParameterState, dims: tuple[int, ...], begin: int, end: int
) -> dict[str, Any] | None:
    """The state of some elements, put together from whatever ranges have it.

    Args:
        name: Of the parameter, for errors.
        state: All that there is.
        dims: The order of dimensions in which `begin` and `end` count.
        begin: The first element.
        end: Behind the last one.

    Returns:
        What a StateRange holds; None if the parameter was never updated.

    Raises:
        InvalidUsage: No range has some of the elements, or one has what can't be cut.
    """
    if dims != state.dims and state.ranges:
        state = _in_order(name, state, dims)
    values: dict[str, Any] = {}
    for piece, first, stop in _pieces(name, state, begin, end):
        for key, value in piece.values.items():
            if (piece.begin, piece.end) != (begin, end):
                require_divisible(name, {key: value}, piece.end - piece.begin)
            if not is_per_element(value, piece.end - piece.begin):
                values.setdefault(key, value.clone() if isinstance(value, Tensor) else value)
                continue
            if key not in values:
                values[key] = value.new_empty(end - begin)
            part = value.reshape(-1)[first - piece.begin : stop - piece.begin]
            values[key][first - begin : stop - begin] = part
    return values or None


def require_elements(
    name: str, state: ParameterState, dims: tuple[int, ...], begin: int, end: int
) -> None:
    """Raises where `cut_out` would, and copies nothing."""
    is_reordered = dims != state.dims and bool(state.ranges)
    if is_reordered:
        begin, end = 0, state.count
    for piece, _, _ in _pieces(name, state, begin, end):
        # Values that are read from a checkpoint on demand were checked when it was opened.
        is_here = isinstance(piece.values, dict)
        if is_here and (is_reordered or (piece.begin, piece.end) != (begin, end)):
            require_divisible(name, piece.values, piece.end - piece.begin)


def _pieces(
    name: str, state: ParameterState, begin: int, end: int
) -> list[tuple[StateRange, int, int]]:
    """The ranges that have some elements, each with the first and behind the last of them."""
    found: list[tuple[StateRange, int, int]] = []
    if not state.ranges and not state.is_part:
        return found
    if state.count == 0:
        return [(piece, 0, 0) for piece in state.ranges[:1]]
    here = begin
    for piece in sorted((r for r in state.ranges if r.begin < end and r.end > begin), key=_begin):
        if piece.begin > here:
            break
        if piece.end > here:
            stop = min(piece.end, end)
            found.append((piece, here, stop))
            here = stop
    if here < end:
        raise InvalidUsage(
            f"the state of parameter {name} lacks elements {here} to {end}, because it was cut "
            "into other shards (of other buckets, or for other ranks): load the parts of all ranks "
            "that saved it (pydist.ShardedState.merged puts them together), or use pydist.save and "
            "pydist.load"
        )
    kinds = {frozenset(piece.values) for piece, _, _ in found}
    if len(kinds) > 1:
        said = " and ".join(sorted(", ".join(sorted(kind)) or "nothing" for kind in kinds))
        raise InvalidUsage(
            f"the state of parameter {name} has {said} for different elements: its parts are of "
            "different steps, or of different optimizers"
        )
    return found


def _begin(piece: StateRange) -> int:
    return piece.begin


def _in_order(name: str, state: ParameterState, dims: tuple[int, ...]) -> ParameterState:
    """The whole state of a parameter, with its elements in another order."""
    count = state.count
    whole = cut_out(name, state, state.dims, 0, count) or {}
    require_divisible(name, whole, count)
    values = {
        key: shaped(value, state.shape, state.dims).permute(dims).reshape(-1)
        if is_per_element(value, count)
        else value
        for key, value in whole.items()
    }
    return ParameterState(state.shape, dims, [StateRange(0, count, values)])


def from_whole(parameter: Tensor, values: Mapping[str, Any]) -> ParameterState:
    """The state that an unsharded optimizer of torch's has for a parameter."""
    dims = dims_in_memory(parameter.shape, dense_strides(parameter))
    flat = {
        key: value.detach().permute(dims).reshape(-1)
        if isinstance(value, Tensor)
        and value.shape == parameter.shape
        and (parameter.dim() != 0 or key not in NUMBERS)
        else value
        for key, value in values.items()
    }
    ranges = [StateRange(0, parameter.numel(), flat)] if flat else []
    return ParameterState(tuple(parameter.shape), dims, ranges)


def to_whole(name: str, state: ParameterState) -> dict[str, Any]:
    """The state of a whole parameter, as an unsharded optimizer of torch's has it.

    Tensors lie in memory as the parameter did: torch's fused steps read both as rows.
    """
    count = state.count
    values = cut_out(name, state, state.dims, 0, count) or {}
    return {
        key: shaped(value, state.shape, state.dims) if is_per_element(value, count) else value
        for key, value in values.items()
        if key != MASTER
    }


# -- the values of a range


def is_per_element(value: Any, count: int) -> bool:
    """Whether a value of a range's state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() != 0 and value.numel() == count


def is_of_range(value: Any, count: int) -> bool:
    """Whether a value of a range's state is of all its elements together, such as scales of blocks.

    It has neither an element for each of the parameter's, nor is it one for all, so it means
    nothing to any other range.
    """
    return any(tensor.numel() > 1 for tensor in _tensors_in(value)) and not is_per_element(
        value, count
    )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def require_divisible(
    name: str, values: Mapping[str, Any], count: int, kind: str = "the optimizer"
) -> None:
    """Raises InvalidUsage where values of a range can't be cut for other ranges, see `is_of_range`.

    Args:
        name: Of the parameter.
        values: What a StateRange holds.
        count: Elements of the range.
        kind: The optimizer's class.
    """
    for key, value in values.items():
        if is_of_range(value, count):
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else "several tensors"
            raise InvalidUsage(
                f"{kind} keeps {key!r} for {count} elements of parameter {name}: {what}, which is "
                "neither a value for each element nor one for all, so it can't be cut for other "
                "shards; use state_dict() and load_state_dict() with as many ranks and the same "
                f"buckets, another class, or {kind} without pydist.ShardedOptimizer"
            )
