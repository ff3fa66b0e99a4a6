"""The state of one parameter in `optimizer.state` of a sharded optimizer, as one rank has it.

Note [Marked tensors]: whoever saves such a tensor, by `torch.save` or torch's distributed
checkpoint, would keep one rank's part for all. So each has an attribute that raises when it is
pickled, and that torch's distributed checkpoint calls when it plans to write the tensor.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from pydist.errors import InvalidUsage
from pydist.sharding.buckets import Bucket, Segment, shaped
from pydist.sharding.state.ranges import NUMBERS, ParameterState, is_per_element

REMEDY = (
    "change the values in place to reset them, replace the state by load_state_dict() or "
    "pydist.load(), and keep it by pydist.save()"
)

WHAT_IT_IS = (
    "optimizer.state of a pydist.ShardedOptimizer shows the state of this rank's shards alone"
)


@dataclass
class Source:
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
        """As the class that steps has them."""
        if self.place is not None:
            bucket, segment = self.place
            assert bucket.optimizer is not None
            found: Mapping[str, Any] = bucket.optimizer.state.get(segment.updated, {})
            return found
        if self.waiting is not None and self.waiting.ranges:
            return self.waiting.ranges[0].values
        return {}

    def shown(self, value: Any) -> Any:
        """What is given out for a value: of the same memory."""
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
        """What a value becomes in the state of this rank's segment.

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
            f"{WHAT_IT_IS}, and {name!r} of parameter {self.name} can't become {what} there; this "
            f"rank has {here or 'nothing'} of it, and takes tensors of these sizes or of the "
            f"parameter's, {tuple(self.parameter.shape)}"
        )


class StateOfShard(dict[str, Any]):
    """The state of one parameter, as this rank has it; a plain dictionary where a program makes it.

    It follows the optimizer: what it holds is brought up to date whenever it is looked at.
    """

    source: Source | None = None
    _kept: Mapping[str, Any]

    # By the methods below; a dictionary's own look past them.
    __contains__: Any = Mapping.__contains__
    get: Any = Mapping.get
    keys: Any = Mapping.keys
    values: Any = Mapping.values
    items: Any = Mapping.items
    pop: Any = MutableMapping.pop
    setdefault: Any = MutableMapping.setdefault
    update: Any = MutableMapping.update

    @classmethod
    def of(cls, source: Source) -> StateOfShard:
        """That of a parameter of an optimizer."""
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
            f"{name} of parameter {self.source.name}: {WHAT_IT_IS}, and this rank has "
            f"{listed_names(self.source.values()) or 'nothing'} of it"
        )

    def __iter__(self) -> Iterator[str]:
        self._follow()
        return super().__iter__()

    def __len__(self) -> int:
        self._follow()
        return super().__len__()

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

    def __ior__(self, other: Any) -> StateOfShard:  # type: ignore[override,misc]
        self.update(other)
        return self

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise KeyError(name)
        self._remove([name])

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
                f"{WHAT_IT_IS}, and {listed_names(names)} of parameter {self.source.name} can't be "
                f"removed on this rank: {REMEDY}"
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


def listed_names(names: Iterable[str]) -> str:
    """Names for people."""
    return ", ".join(map(str, names))
