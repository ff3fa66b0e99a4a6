"""`optimizer.state` of a sharded optimizer: what walks it sees this rank's shards.

Programs and frameworks walk the state of any optimizer: to log the norms of moments, to move them
to a device, to reset momentum. They find, for each parameter of which this rank has state, the
names that the optimizer's class gives it, with tensors of one dimension: the elements that this
rank's shard has of the parameter. Those share memory with the optimizer, so what changes one in
place changes the shard. A parameter that is wholly on other ranks has an empty mapping. Of one that
this rank has alone (torch calls it ignored), tensors have the parameter's shape.

They are plain tensors, not DTensors: shards cut parameters anywhere, which no placement of DTensor
says, and what a DTensor computes waits for all ranks, where a program logs on one.

In a world of one nothing is a part: tensors have the parameters' shapes, and all that can be done
with the state of torch's optimizers can be done.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, NoReturn

from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.sharding.buckets import Bucket, Segment
from pydist.sharding.placement import ShardedLayout
from pydist.sharding.state.ranges import ParameterState
from pydist.sharding.state.refused_saving import refuse_checkpoints
from pydist.sharding.state.shown_parameter_state import (
    REMEDY,
    WHAT_IT_IS,
    Source,
    StateOfShard,
    listed_names,
)


class StateOfShards(defaultdict[Tensor, Any]):
    """`optimizer.state`: by parameter, what this rank has of its state; see the module's text.

    It keeps nothing itself, and what it gives out is always the present state.

    Args:
        layout: The parameters.
        waiting: The whole state of parameters that have no place yet, by number.
        forget: Called where tensors of the state were replaced by others.
        rank: This rank.
        size: How many there are.
    """

    # By the methods below; a dictionary's own look past them.
    keys: Any = Mapping.keys
    values: Any = Mapping.values
    items: Any = Mapping.items
    update: Any = MutableMapping.update

    def __init__(
        self,
        layout: ShardedLayout,
        waiting: Mapping[int, ParameterState],
        forget: Callable[[], None],
        rank: int,
        size: int,
    ) -> None:
        super().__init__(dict)
        self._layout = layout
        self._waiting = waiting
        self._forget = forget
        self._rank = rank
        self._size = size
        self._is_new = True
        self._known_buckets = 0
        self._places: dict[int, tuple[Bucket, Segment]] = {}

    def note_state(self) -> None:
        """From now on there may be some, on some rank."""
        self._is_new = False

    # -- reading

    def __getitem__(self, parameter: Tensor) -> StateOfShard:
        self._refuse_checkpoints()
        index = self._layout.indices.get(id(parameter))
        if index is None:
            raise KeyError(
                "optimizer.state was asked for a tensor that the optimizer does not have"
            )
        return StateOfShard.of(self._source(index))

    def get(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter, if this rank has any; otherwise `default`."""
        if key not in self:
            return default
        return self[key]

    def __iter__(self) -> Iterator[Tensor]:
        self._refuse_checkpoints()
        return iter([p for i, p in enumerate(self._layout.parameters) if self._source(i).values()])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, key: object) -> bool:
        self._refuse_checkpoints()
        index = self._layout.indices.get(id(key))
        return index is not None and bool(self._source(index).values())

    def copy(self) -> Any:
        """A dictionary of the same mappings, which it keeps; they go on to show the state."""
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._require_whole("a copy of it")
        return copy.deepcopy(self._plain(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._refuse_checkpoints()
        self._require_whole("pickling it")
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"StateOfShards(rank {self._rank} of {self._size}, of {len(self)} parameters)"

    __str__ = __repr__

    # -- writing

    def __setitem__(self, parameter: Tensor, values: Mapping[str, Any]) -> None:
        """Replaces values by others of the same names and sizes, as who moves them does."""
        shown = self[parameter]
        values = dict(values)  # they may be what is replaced
        if self._size == 1:
            shown.clear()
            shown.update(values)
            return
        source = shown.source
        assert source is not None
        names = source.values().keys()
        if names and set(names) != set(values):
            given, known = listed_names(values), listed_names(names)
            self._refuse(f"{given} in place of {known} for parameter {source.name}")
        fitting = {name: source.fitting(name, value) for name, value in values.items()}
        for name, value in fitting.items():
            source.put(name, value)

    def assign(self, state: Any) -> None:
        """For `optimizer.state = state`: the same as setting all that it has."""
        if state is self or (self._is_new and not state):
            return
        if self._size == 1:
            given = {parameter: dict(values) for parameter, values in state.items()}
            self.clear()
            self.update(given)
            return
        if not state or set(map(id, state)) != set(map(id, self)):
            self._refuse("optimizer.state = ... of other parameters than it has")
        self.update(state)

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """The state of a parameter; where there is none, it becomes `default`."""
        if key not in self:
            self[key] = {} if default is None else default
        return self[key]

    def __delitem__(self, parameter: Tensor) -> None:
        self._require_whole("removing state from it")
        if parameter not in self:
            raise KeyError(parameter)
        self[parameter].clear()

    def pop(self, key: Any, *default: Any) -> Any:
        """Removes the state of a parameter, in a world of one, and returns it."""
        self._require_whole("removing state from it")
        if key not in self and default:
            return default[0]
        found = dict(self[key])
        del self[key]
        return found

    def popitem(self) -> tuple[Tensor, Any]:
        """Removes the last one, in a world of one."""
        self._require_whole("removing state from it")
        if not len(self):
            raise KeyError("optimizer.state is empty")
        parameter = list(self)[-1]
        return parameter, self.pop(parameter)

    def clear(self) -> None:
        """Removes all state, in a world of one."""
        self._require_whole("clearing it")
        for parameter in list(self):
            del self[parameter]

    # -- how

    def _source(self, index: int) -> Source:
        if self._known_buckets != len(self._layout.buckets):
            self._places = {
                segment.member.index: (bucket, segment)
                for bucket in self._layout.buckets
                for segment in bucket.segments
            }
            self._known_buckets = len(self._layout.buckets)
        place = self._places.get(index)
        return Source(
            self._layout.names[index],
            self._layout.parameters[index],
            place,
            self._waiting.get(index) if place is None else None,
            self._size,
            self._forget,
        )

    def _plain(self) -> defaultdict[Tensor, Any]:
        return defaultdict(dict, {parameter: dict(values) for parameter, values in self.items()})

    def _refuse_checkpoints(self) -> None:
        if self._size > 1:
            refuse_checkpoints()

    def _require_whole(self, what: str) -> None:
        if self._size > 1:
            self._refuse(what)

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidUsage(f"{WHAT_IT_IS}, which {what} does not do with: {REMEDY}")
