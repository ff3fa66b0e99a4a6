"""`optimizer.state` of a sharded optimizer: what walks it sees this rank's shards.

Programs and frameworks walk the state of any optimizer: to log the norms of moments, to move them
to a device, to reset momentum. They find, for each parameter of which this rank has state, the
names that the optimizer's class gives it, with tensors of one dimension: the elements that this
rank's shard has of the parameter. Those share memory with the optimizer, so what changes one in
place changes the shard. A parameter that is wholly on other ranks has an empty mapping. Of one that
this rank has alone (torch calls it ignored), tensors have the parameter's shape.

They are plain tensors, not DTensors: shards cut parameters anywhere, which no placement of DTensor
says, and what a DTensor computes waits for all ranks, where a program logs on one.

Note [Marked tensors]: whoever saves such a tensor, by `torch.save` or torch's distributed
checkpoint, would keep one rank's part for all. So each has an attribute that raises when it is
pickled, and that torch's distributed checkpoint calls when it plans to write the tensor.

In a world of one nothing is a part: tensors have the parameters' shapes, and all that can be done
with the state of torch's optimizers can be done.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.sharding.buckets import Bucket, Segment, shaped
from pydist.sharding.placement import ShardedLayout
from pydist.sharding.sharded_state import NUMBERS, ParameterState
from pydist.sharding.state_guard import refuse_checkpoints
from pydist.sharding.state_values import is_per_element

_REMEDY = (
    "change the values in place to reset them, replace the state by load_state_dict() or "
    "pydist.load(), and keep it by pydist.save()"
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

    def keys(self) -> Any:
        """The parameters of which this rank has state."""
        return KeysView(self)

    def values(self) -> Any:
        """What this rank has of the state of each."""
        return ValuesView(self)

    def items(self) -> Any:
        """Both."""
        return ItemsView(self)

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
            self._refuse(
                f"{_names(values)} in place of {_names(names)} for parameter {source.name}"
            )
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

    def update(self, *given: Any, **named: Any) -> None:
        """Sets each of them."""
        for parameter, values in dict(*given, **named).items():
            self[parameter] = values

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

    def _source(self, index: int) -> _Source:
        if self._known_buckets != len(self._layout.buckets):
            self._places = {
                segment.member.index: (bucket, segment)
                for bucket in self._layout.buckets
                for segment in bucket.segments
            }
            self._known_buckets = len(self._layout.buckets)
        place = self._places.get(index)
        return _Source(
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
        raise InvalidUsage(f"{_WHAT_IT_IS}, which {what} does not do with: {_REMEDY}")


_WHAT_IT_IS = (
    "optimizer.state of a pydist.ShardedOptimizer shows the state of this rank's shards alone"
)


@dataclass
class _Source:
    """Where the state of one parameter is.

    Attributes:
        name: Of the parameter.
        parameter: It.
        place: The bucket and this rank's segment of it; None if it is wholly on other ranks, or has
            no place yet.
        waiting: The whole state of one that has no place yet, if any was loaded.
        size: The number of ranks.
        forget: Called where tensors were replaced.
    """

    name: str
    parameter: Tensor
    place: tuple[Bucket, Segment] | None
    waiting: ParameterState | None
    size: int
    forget: Callable[[], None]

    def values(self) -> Mapping[str, Any]:
        """The values, as the class that steps has them."""
        if self.place is not None:
            bucket, segment = self.place
            assert bucket.optimizer is not None
            found: Mapping[str, Any] = bucket.optimizer.state.get(segment.updated, {})
            return found
        if self.waiting is not None and self.waiting.ranges:
            return self.waiting.ranges[0].values
        return {}

    def shown(self, value: Any) -> Any:
        """A value as it is given out, over the same memory."""
        if self.place is None:
            state = self.waiting
            if state is None or not is_per_element(value, state.count):
                return value
            return shaped(value, state.shape, state.dims)
        if not is_per_element(value, self._count):
            return value
        row: Tensor = value.detach()
        if self._is_whole:
            member = self.place[1].member
            row = shaped(row, member.parameter.shape, member.dims)
        if self.size == 1:
            return row
        row.__create_write_items__ = _MARK  # type: ignore[attr-defined]  # see Note [Marked tensors]
        return row

    def put(self, name: str, value: Any) -> None:
        """Takes over what is `fitting`."""
        if self.place is None:
            return
        bucket, segment = self.place
        assert bucket.optimizer is not None
        own = bucket.optimizer.state[segment.updated]
        if own.get(name, own) is not value:
            own[name] = value
            self.forget()

    def remove(self, names: Iterable[str]) -> None:
        """In a world of one."""
        if self.place is None:
            raise InvalidUsage(
                f"parameter {self.name} is frozen, and its state waits until it trains: "
                "load_state_dict() replaces it"
            )
        bucket, segment = self.place
        assert bucket.optimizer is not None
        own = bucket.optimizer.state[segment.updated]
        for name in list(names):
            del own[name]
        if not own:
            del bucket.optimizer.state[segment.updated]
        self.forget()

    def fitting(self, name: str, value: Any) -> Any:
        """A value, as it is kept in the state of this rank's segment.

        Raises:
            InvalidUsage: It is not of this segment's size, nor of the parameter's, or it has a name
                that the class does not keep.
        """
        if self.place is None:
            if self.size == 1:
                self.remove(())
            if isinstance(value, Tensor) and value.numel() > 1:
                self._require(name, value, value.shape == self.parameter.shape)
            return None  # the part of it that other ranks have is theirs
        own = self.values()
        before = own.get(name)
        if self.size == 1 and (before is None or not is_per_element(before, self._count)):
            is_number = self.parameter.dim() == 0 and name in NUMBERS
            is_whole = isinstance(value, Tensor) and value.shape == self.parameter.shape
            return self._row(value) if is_whole and not is_number else value
        self._require(name, value, name in own)
        if not is_per_element(before, self._count):
            is_one = not isinstance(value, (Tensor, Mapping, list, tuple)) or (
                isinstance(value, Tensor) and value.numel() == 1
            )
            self._require(name, value, is_one)
            if isinstance(before, Tensor) and isinstance(value, (int, float)):
                return torch.full_like(before, value)
            return value
        self._require(name, value, isinstance(value, Tensor))
        assert isinstance(before, Tensor)
        if value.shape == (self._count,):
            row = value.detach().contiguous()
        else:
            self._require(name, value, value.shape == self.parameter.shape)
            row = self._row(value)
        is_same = (row.data_ptr(), row.dtype, row.device) == (
            before.data_ptr(),
            before.dtype,
            before.device,
        )
        return before if is_same else row

    def _row(self, whole: Tensor) -> Tensor:
        """This rank's part of what has a value for each element of the parameter."""
        assert self.place is not None
        part = self.place[1].of(whole.detach())
        return part if self._is_whole else part.clone()

    @property
    def _is_whole(self) -> bool:
        """Whether this rank has all of the parameter's state, if any."""
        return self.size == 1 or (self.place is not None and self.place[0].is_own)

    @property
    def _count(self) -> int:
        assert self.place is not None
        return self.place[1].values.numel()

    def _require(self, name: str, value: Any, is_right: bool) -> None:
        if is_right:
            return
        what = type(value).__name__
        if isinstance(value, Tensor):
            what = f"a tensor of shape {tuple(value.shape)}"
        here = ", ".join(
            f"{key}: {tuple(kept.shape) if isinstance(kept, Tensor) else type(kept).__name__}"
            for key, kept in self.values().items()
        )
        raise InvalidUsage(
            f"{_WHAT_IT_IS}, and {name!r} of parameter {self.name} can't become {what} there; this "
            f"rank has {here or 'nothing'} of it, and takes tensors of these sizes or of the "
            f"parameter's, {tuple(self.parameter.shape)}"
        )


class StateOfShard(dict[str, Any]):
    """The state of one parameter, as this rank has it; a plain dictionary where a program makes it.

    It follows the optimizer: what it holds is brought up to date whenever it is looked at.
    """

    source: _Source | None = None
    _kept: Mapping[str, Any]

    @classmethod
    def of(cls, source: _Source) -> StateOfShard:
        """The state of one parameter of an optimizer."""
        shown = cls()
        shown._kept = {}
        shown.source = source
        shown._follow()
        return shown

    def _follow(self) -> None:
        if self.source is None:
            return
        values = self.source.values()
        for name in [name for name in self._kept if name not in values]:
            super().__delitem__(name)
        for name, value in values.items():
            if self._kept.get(name, self) is not value:
                super().__setitem__(name, self.source.shown(value))
        self._kept = dict(values)

    def __getitem__(self, name: str) -> Any:
        self._follow()
        return super().__getitem__(name)

    def __missing__(self, name: str) -> Any:
        if self.source is None or self.source.size == 1:
            raise KeyError(name)
        raise KeyError(
            f"{name} of parameter {self.source.name}: {_WHAT_IT_IS}, and this rank has "
            f"{_names(self.source.values()) or 'nothing'} of it"
        )

    def get(self, name: str, default: Any = None) -> Any:
        self._follow()
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._follow()
        return super().__contains__(name)

    def __iter__(self) -> Iterator[str]:
        self._follow()
        return super().__iter__()

    def __len__(self) -> int:
        self._follow()
        return super().__len__()

    def keys(self) -> Any:
        self._follow()
        return super().keys()

    def values(self) -> Any:
        self._follow()
        return super().values()

    def items(self) -> Any:
        self._follow()
        return super().items()

    def copy(self) -> dict[str, Any]:
        return dict(self.items())

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(self.copy(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # What torch.load(weights_only=True) knows.
        return OrderedDict, (), None, None, iter(self.copy().items())

    def __repr__(self) -> str:
        return repr(self.copy())

    def __eq__(self, other: object) -> bool:
        return self.copy() == other

    def __setitem__(self, name: str, value: Any) -> None:
        if self.source is None:
            super().__setitem__(name, value)
            return
        self.source.put(name, self.source.fitting(name, value))
        self._follow()

    def update(self, *given: Any, **named: Any) -> None:
        for name, value in dict(*given, **named).items():
            self[name] = value

    def __ior__(self, other: Any) -> StateOfShard:  # type: ignore[override,misc]
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        if name not in self:
            self[name] = default
        return self[name]

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._remove([name])

    def pop(self, name: str, *default: Any) -> Any:
        if name not in self and default:
            return default[0]
        value = self[name]
        self._remove([name])
        return value

    def popitem(self) -> tuple[str, Any]:
        name = list(self)[-1]
        return name, self.pop(name)

    def clear(self) -> None:
        self._remove(list(self))

    def _remove(self, names: list[str]) -> None:
        if self.source is None:
            for name in names:
                super().__delitem__(name)
            return
        if self.source.size > 1:
            raise InvalidUsage(
                f"{_WHAT_IT_IS}, and {_names(names)} of parameter {self.source.name} can't be "
                f"removed on this rank: {_REMEDY}"
            )
        if names:
            self.source.remove(names)
        self._follow()


class _Mark:
    """See Note [Marked tensors]."""

    def __call__(self, *_: Any) -> NoReturn:
        raise InvalidUsage(
            "a tensor of optimizer.state of a pydist.ShardedOptimizer is one rank's part of a "
            "state, and would be kept for all of it: use pydist.save(optimizer=), which keeps all; "
            "state_dict() is this rank's part, for a file of its own"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Mark:
        return self


_MARK = _Mark()


def _names(names: Iterable[str]) -> str:
    return ", ".join(map(str, names))
