"""An optimizer's state by the names of parameters, whether sharded or not."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.checkpoint.own_names import is_own, own_name, owner_in
from pydist.checkpoint.pieces import Piece, of_range, share_out
from pydist.errors import InvalidUsage
from pydist.parallel.state_names import distinct_names, plain_name
from pydist.sharding.buckets import SHORT, dense_strides
from pydist.sharding.element_wise import require_plain_options
from pydist.sharding.optimizer import ShardedOptimizer
from pydist.sharding.options_of_class import require_options_of
from pydist.sharding.sharded_state import (
    MASTER,
    ParameterState,
    ShardedState,
    StateRange,
    from_whole,
    matching_groups,
    to_whole,
)
from pydist.sharding.state_dict_form import from_unsharded, is_sharded, require_form, without_absent
from pydist.sharding.state_values import is_per_element, require_divisible

if TYPE_CHECKING:
    from pydist.checkpoint.dcp_files import Contents

# Comes between what a checkpoint calls an optimizer ("optimizer", or "optimizer.G" where there are
# several) and the names of its tensors: `optimizer.state.NAME.KEY`.
_STATE = "state"

# What a checkpoint calls the parameter itself.
_MODEL = "model."

# What a model calls parameters, by their ids; None for those that it has no more.
Names = Mapping[int, str | None]

# Of an optimizer: the groups, with names of parameters; and of each parameter shape, order of
# dimensions, names of what has a value for each element, and the values that are for all. Where
# ranks have parameters alone, also "own": the names in each rank's groups, by rank.
Outline = dict[str, Any]


@dataclass
class Taken:
    """What a rank knows of an optimizer's state.

    Attributes:
        outline: Its own part: of parameters whose first element it has, all that is small.
        pieces: What it writes.
    """

    outline: Outline
    pieces: list[Piece]


def entry_of(root: str, name: str, key: str) -> str:
    """What a checkpoint calls a part of the state of a parameter, of the optimizer at `root`."""
    return f"{root}.{_STATE}.{name}.{key}"


@dataclass(frozen=True)
class Master:
    """The float32 copy of a parameter, in a checkpoint.

    Attributes:
        entry: What it is called.
        dims: The order of the dimensions in which its elements lie.
    """

    entry: str
    dims: tuple[int, ...]


def masters_in(root: str, outline: Outline) -> dict[str, Master]:
    """The parameters that have float32 copies with the optimizer at `root`."""
    return {
        name: Master(entry_of(root, name, MASTER), tuple(entry["dims"]))
        for name, entry in outline["parameters"].items()
        if MASTER in entry["keys"]
    }


def take(optimizer: Optimizer, root: str, names: Names, rank: int, size: int) -> Taken:
    """Looks at the state of an optimizer, of either kind. Talks to nobody, copies nothing.

    Args:
        optimizer: Sharded or not.
        root: What a checkpoint calls it.
        names: What it calls parameters.
        rank: This one.
        size: The number of ranks.
    """
    _require_optimizer(optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        state = _renamed(optimizer, names, rank)
    else:
        state = _of_whole(optimizer, names, rank)
    return _outlined(state, root, rank, size, type_of(optimizer))


def _require_optimizer(optimizer: object) -> None:
    if not isinstance(optimizer, Optimizer):
        raise InvalidUsage(
            f"optimizer is a {type(optimizer).__name__}; it must be an optimizer, or a mapping of "
            "names to optimizers"
        )
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise InvalidUsage(
            "torch's ZeroRedundancyOptimizer has a part of its state on each rank, and does not "
            "say which: pydist.checkpoint.from_torch takes the state_dict() that it has after "
            "consolidate_state_dict(); pydist.ShardedOptimizer is saved as it is"
        )


def type_of(optimizer: Optimizer) -> str:
    """The name of the class that updates."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.optimizer_class.__name__
    return type(optimizer).__name__


def merged(outlines: list[Outline]) -> Outline:
    """The outlines of all ranks as one.

    Raises:
        InvalidUsage: They are of other parameters, or those lie in memory otherwise.
    """
    whole = dict(outlines[0])
    groups = [[group["params"] for group in outline["groups"]] for outline in outlines]
    if any(_is_own(name) for own in groups for group in own for name in group):
        whole["own"] = dict(enumerate(groups))
        whole["groups"] = [
            {**group, "params": [name for name in group["params"] if not _is_own(name)]}
            for group in whole["groups"]
        ]
    first, *others = [{n for group in own for n in group if not _is_own(n)} for own in groups]
    for rank, names in enumerate(others, 1):
        if odd := sorted(first ^ names):
            raise InvalidUsage(
                f"the optimizer has parameter {odd[0]} on rank {0 if odd[0] in first else rank} "
                f"and not on rank {rank if odd[0] in first else 0}: change the model alike on all "
                "ranks, by replaced, inserted and deleted layers"
            )
    parameters: dict[str, Any] = {}
    for outline in outlines:
        for name, entry in outline["parameters"].items():
            known = parameters.get(name, entry)
            if known["keys"] and entry["keys"] and known["dims"] != entry["dims"]:
                raise InvalidUsage(
                    f"parameter {name} lies in memory otherwise on some ranks (dimensions in order "
                    f"{entry['dims']} and {known['dims']}): give it one memory_format on all"
                )
            # The rank that has the first element knows more than the others.
            if name not in parameters or entry["keys"] or entry["numbers"]:
                parameters[name] = entry
    whole["parameters"] = parameters
    return whole


def outline_of(whole: Outline, rank: int) -> Outline:
    """What of an outline of all ranks is one rank's: all but what others have alone."""
    if "own" not in whole:
        return whole
    mine = whole["own"][rank]
    return {
        **whole,
        "groups": [
            {**group, "params": names} for group, names in zip(whole["groups"], mine, strict=True)
        ],
        "parameters": {
            name: entry
            for name, entry in whole["parameters"].items()
            if owner_in(name) in (None, rank)
        },
    }


def own_in(whole: Outline) -> list[str]:
    """The names in an outline of all ranks of what ranks have alone."""
    groups = (group for own in whole.get("own", {}).values() for group in own)
    return [name for group in groups for name in group if _is_own(name)]


def _is_own(name: str) -> bool:
    return owner_in(name) is not None


def _outlined(state: ShardedState, root: str, rank: int, size: int, kind: str) -> Taken:
    parameters: dict[str, Any] = {}
    own: list[Piece] = []
    # Of parameters whose state all ranks have whole.
    shared: list[Piece] = []
    for name, known in state.parameters.items():
        count = known.count
        pieces = own if known.is_part or _is_own(name) else shared
        keys: list[str] = []
        numbers: dict[str, Any] = {}
        for piece in known.ranges:
            if known.is_part:
                require_divisible(name, piece.values, piece.end - piece.begin, kind)
            per_element = {
                key: value
                for key, value in piece.values.items()
                if count and is_per_element(value, piece.end - piece.begin)
            }
            if piece.begin == 0:
                keys = list(per_element)
                numbers = {
                    key: value.cpu() if isinstance(value, Tensor) else value
                    for key, value in piece.values.items()
                    if key not in per_element
                }
            for key, value in per_element.items():
                pieces += of_range(entry_of(root, name, key), count, piece.begin, value)
        parameters[name] = {
            "shape": known.shape,
            "dims": known.dims,
            "keys": keys,
            "numbers": numbers,
        }
    outline = {"class": kind, "groups": state.groups, "parameters": parameters}
    return Taken(outline, own + share_out(shared, rank, size))


def _renamed(optimizer: ShardedOptimizer, names: Names, rank: int) -> ShardedState:
    local = optimizer.sharded_state()
    renaming = _renaming(optimizer, names, rank)
    return ShardedState(
        {renaming[name]: known for name, known in local.parameters.items()},
        [{**group, "params": [renaming[n] for n in group["params"]]} for group in local.groups],
    )


def _renaming(optimizer: ShardedOptimizer, names: Names, rank: int) -> dict[str, str]:
    """What a checkpoint calls the parameters that an optimizer has names of its own for."""
    own = [name for group in optimizer.named() for name in group]
    known = [name for group in _named(optimizer, names, rank) for name in group]
    return dict(zip(own, known, strict=True))


def _named(optimizer: Optimizer, names: Names, rank: int) -> list[dict[str, Tensor]]:
    """The parameters that a state is of, by their names in a checkpoint, group by group.

    Without those that the model has no more, which the model's own state lacks as well.

    Raises:
        InvalidUsage: There are no others.
    """
    kept: list[list[Tensor]] = []
    own: list[str] = []
    if isinstance(optimizer, ShardedOptimizer):
        for named in optimizer.named():
            kept.append(list(named.values()))
            own += named
    else:
        for group in optimizer.param_groups:
            kept.append([])
            given = group.get("param_names")
            for position, parameter in enumerate(group["params"]):
                if names.get(id(parameter), "") is not None:
                    kept[-1].append(parameter)
                    own.append(plain_name(given[position]) if given else str(len(own)))
    if not own:
        raise InvalidUsage(
            "the model has none of the optimizer's parameters any more: all of them were replaced "
            "since the optimizer was made; make it anew, of those that the model has now"
        )
    flat = [parameter for group in kept for parameter in group]
    own = [own_name(n, rank) if is_own(p) else n for n, p in zip(own, flat, strict=True)]
    distinct = iter(distinct_names([names.get(id(p)) for p in flat], own))
    return [{next(distinct): parameter for parameter in group} for group in kept]


def _of_whole(optimizer: Optimizer, names: Names, rank: int) -> ShardedState:
    named = _named(optimizer, names, rank)
    options = [
        {k: v for k, v in group.items() if k not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]
    return ShardedState(
        {
            name: from_whole(parameter, optimizer.state.get(parameter, {}))
            for group in named
            for name, parameter in group.items()
        },
        [{**own, "params": list(group)} for own, group in zip(options, named, strict=True)],
    )


def check_fits(optimizer: Optimizer, names: Names, outline: Outline, rank: int) -> None:
    """Whether an optimizer can take a state, of which the outline is this rank's.

    Raises:
        InvalidUsage: It is of another class, of other parameters or groups, or has options that the
            optimizer does not take, or values that can't be cut into shards.
    """
    _require_optimizer(optimizer)
    if outline["class"] != type_of(optimizer):
        raise InvalidUsage(
            f"the checkpoint is of {outline['class']}, and the optimizer is {type_of(optimizer)}"
        )
    if isinstance(optimizer, ShardedOptimizer):
        for group in outline["groups"]:
            require_plain_options(group)
        for name, entry in outline["parameters"].items():
            count = math.prod(entry["shape"])
            require_divisible(name, entry["numbers"], count, outline["class"])
    named = _named(optimizer, names, rank)
    ours = [list(group) for group in named]
    theirs = [group["params"] for group in outline["groups"]]
    if matching_groups(ours, theirs) is None:
        a, b = ({n for group in side for n in group} for side in (ours, theirs))
        odd = sorted(a ^ b)
        raise InvalidUsage(
            "the checkpoint's parameter groups are not the optimizer's: "
            f"{[len(group) for group in theirs]} and {[len(group) for group in ours]} parameters"
            + (f"; only one of them has {odd[0]}" if odd else ", in another order")
        )
    for group in named:
        for name, parameter in group.items():
            shape = tuple(outline["parameters"][name]["shape"])
            if shape != tuple(parameter.shape):
                raise InvalidUsage(
                    f"the checkpoint's state of {name} is of {shape}, and the parameter is "
                    f"{tuple(parameter.shape)}"
                )


def check_torchs(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Whether an optimizer can take what a class of torch's has for whole parameters.

    Raises:
        InvalidUsage: It is of another class, of other parameters, or of a part of them.
    """
    require_form(state_dict)
    ordered = [list(group["params"]) for group in optimizer.param_groups]
    if isinstance(optimizer, ShardedOptimizer):
        ordered = [list(group.values()) for group in optimizer.named()]
        present = {id(p) for group in ordered for p in group}
        state_dict = without_absent(state_dict, optimizer.param_groups, present)
    theirs = [len(group["params"]) for group in state_dict["param_groups"]]
    ours = [len(group) for group in ordered]
    if ours != theirs:
        raise InvalidUsage(
            f"the state of the optimizer is of {theirs} parameters in its groups, where the "
            f"optimizer has {ours}: pass all of it, ZeroRedundancyOptimizer's after "
            "consolidate_state_dict()"
        )
    if is_sharded(state_dict):
        if not isinstance(optimizer, ShardedOptimizer):
            raise InvalidUsage(
                f"the state is one rank's part of a pydist.ShardedOptimizer's, where "
                f"{type_of(optimizer)} needs all of it: use pydist.save and pydist.load"
            )
        return
    for group in state_dict["param_groups"]:
        require_options_of(type_of(optimizer), optimizer, group)
    flat = [p for group in ordered for p in group]
    from_unsharded(state_dict, [(str(n), p) for n, p in enumerate(flat)])


def put_back(
    optimizer: Optimizer, root: str, names: Names, outline: Outline, contents: Contents, rank: int
) -> None:
    """Reads what this rank needs of a state into an optimizer, which `check_fits`.

    A sharded one takes it over segment by segment; where reading fails, it has taken a part.
    """
    if isinstance(optimizer, ShardedOptimizer):
        local = optimizer.sharded_state()
        renaming = _renaming(optimizer, names, rank)
        with_masters = {
            own
            for own, known in local.parameters.items()
            if any(MASTER in piece.values for piece in known.ranges)
        }
        # Drops the last reference, so that what is replaced is freed at once.
        del local
        parameters = {}
        for own, (dims, ranges) in optimizer.ranges().items():
            name = renaming[own]
            entry = outline["parameters"][name]
            parameters[own] = _read(contents, root, name, entry, dims, ranges)
            if own in with_masters:
                _add_masters(contents, name, parameters[own], dims, ranges)
        back = {name: own for own, name in renaming.items()}
        groups = [
            {**group, "params": [back[name] for name in group["params"]]}
            for group in outline["groups"]
        ]
        optimizer.load_sharded_state(ShardedState(parameters, groups))
        return
    named = _named(optimizer, names, rank)
    known = _of_all(optimizer, named, outline, whole_state(root, outline, contents))
    optimizer.load_state_dict(laid_out(optimizer, known))


def _of_all(
    optimizer: Optimizer,
    named: list[dict[str, Tensor]],
    outline: Outline,
    known: dict[str, Any],
) -> dict[str, Any]:
    """A state that has all that torch's class asks for: what is not in it, the optimizer keeps.

    Args:
        optimizer: Unsharded.
        named: Its parameters that the state is of.
        outline: Of the state.
        known: The state itself.
    """
    theirs = [group["params"] for group in outline["groups"]]
    matching = dict(matching_groups([list(group) for group in named], theirs) or [])
    state: dict[int, Any] = {}
    groups = []
    number = 0
    for position, group in enumerate(optimizer.param_groups):
        loaded = group
        numbers: Iterator[int] = iter(())
        if position in matching:
            loaded = known["param_groups"][matching[position]]
            numbers = iter(loaded["params"])
        present = {id(parameter) for parameter in named[position].values()}
        own = list(range(number, number + len(group["params"])))
        number += len(own)
        for index, parameter in zip(own, group["params"], strict=True):
            is_loaded = id(parameter) in present
            values = (
                known["state"].get(next(numbers)) if is_loaded else optimizer.state.get(parameter)
            )
            if values:
                state[index] = values
        groups.append({**loaded, "params": own})
    return {"state": state, "param_groups": groups}


def laid_out(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state of an unsharded optimizer, each tensor with the strides that torch would give it.

    torch's fused steps don't look at strides: they take it that state lies as its parameter does.
    """
    state = dict(state_dict["state"])
    for group, known in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for parameter, number in zip(group["params"], known["params"], strict=True):
            if number in state:
                strides = dense_strides(parameter)
                state[number] = {
                    key: _strided(value, strides)
                    if isinstance(value, Tensor) and value.shape == parameter.shape
                    else value
                    for key, value in state[number].items()
                }
    return {**state_dict, "state": state}


def _strided(value: Tensor, strides: tuple[int, ...]) -> Tensor:
    if value.layout != torch.strided or value.stride() == strides:
        return value
    laid = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return laid.copy_(value.detach())


def whole_state(root: str, outline: Outline, contents: Contents) -> dict[str, Any]:
    """The state of the optimizer at `root`, as torch's unsharded class has it: all of it."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for group in outline["groups"]:
        numbers = list(range(number, number + len(group["params"])))
        number += len(numbers)
        for index, name in zip(numbers, group["params"], strict=True):
            entry = outline["parameters"][name]
            count = math.prod(entry["shape"])
            dims = tuple(entry["dims"])
            values = to_whole(name, _read(contents, root, name, entry, dims, [(0, count)]))
            if count == 0 and not values:
                values = _of_no_elements(root, entry["shape"], outline, group["params"], contents)
            if values:
                state[index] = values
        groups.append({**group, "params": numbers})
    return {"state": state, "param_groups": groups}


def _of_no_elements(
    root: str, shape: tuple[int, ...], outline: Outline, group: list[str], contents: Contents
) -> dict[str, Any]:
    """What a parameter without elements has beside others of its group that have state.

    Shards have none of it, and torch's fused steps need all or none.
    """
    known = ((name, outline["parameters"][name]) for name in group)
    other, entry = next(((name, e) for name, e in known if e["keys"]), ("", None))
    if entry is None:
        return {}
    values: dict[str, Any] = copy.deepcopy(entry["numbers"])
    for key in entry["keys"]:
        found = contents.tensor(entry_of(root, other, key))
        if key != MASTER and found is not None:
            values[key] = torch.empty(shape, dtype=found.properties.dtype)
    return values


def _read(
    contents: Contents,
    root: str,
    name: str,
    entry: dict[str, Any],
    dims: tuple[int, ...],
    ranges: list[tuple[int, int]],
) -> ParameterState:
    shape, stored = tuple(entry["shape"]), tuple(entry["dims"])
    if not entry["keys"] and not entry["numbers"]:
        return ParameterState(shape, stored)
    if dims != stored and ranges:
        # The elements lie in another order: those of a range are all over the parameter.
        ranges = [(0, math.prod(shape))]
    return ParameterState(
        shape,
        stored,
        [
            StateRange(
                begin,
                end,
                _Values(
                    {
                        key: _reader(contents, entry_of(root, name, key), begin, end)
                        for key in entry["keys"]
                    },
                    entry["numbers"],
                ),
            )
            for begin, end in ranges
        ],
    )


def _reader(contents: Contents, stored: str, begin: int, end: int) -> Callable[[], Tensor]:
    entry = contents.tensor(stored)
    assert entry is not None

    def read() -> Tensor:
        box = torch.empty(end - begin, dtype=entry.properties.dtype)
        contents.read_tensors([(stored, (begin,), box)])
        return box

    return read


def _add_masters(
    contents: Contents,
    name: str,
    state: ParameterState,
    dims: tuple[int, ...],
    ranges: list[tuple[int, int]],
) -> None:
    """Takes the parameter for its float32 copy, where it had more than 16 bits and so none."""
    entry = contents.tensor(f"{_MODEL}{name}")
    if entry is None or entry.properties.dtype in SHORT:
        return
    if any(MASTER in piece.values for piece in state.ranges):
        return
    if not state.ranges:
        state.dims = dims
        state.ranges = [StateRange(begin, end, _Values({}, {})) for begin, end in ranges]

    def read(begin: int, end: int) -> Tensor:
        whole = torch.empty(entry.size, dtype=torch.float32)
        contents.read_tensors([(f"{_MODEL}{name}", (0,) * whole.dim(), whole)])
        return whole.permute(state.dims).reshape(-1)[begin:end].clone()

    for piece in state.ranges:
        assert isinstance(piece.values, _Values)
        piece.values.add(MASTER, partial(read, piece.begin, piece.end))


class _Values(Mapping[str, Any]):
    """What a StateRange holds; tensors are read whenever they are asked for, and not kept.

    So nobody has more of a state than the optimizer that takes it over, tensor by tensor.

    Args:
        readers: Of what has a value for each element.
        numbers: The rest.
    """

    def __init__(
        self, readers: Mapping[str, Callable[[], Tensor]], numbers: dict[str, Any]
    ) -> None:
        self._readers = dict(readers)
        self._numbers = numbers

    def add(self, key: str, reader: Callable[[], Tensor]) -> None:
        self._readers[key] = reader

    def __getitem__(self, key: str) -> Any:
        return self._readers[key]() if key in self._readers else self._numbers[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._numbers, **self._readers})

    def __len__(self) -> int:
        return len({**self._numbers, **self._readers})

    def __contains__(self, key: object) -> bool:
        return key in self._readers or key in self._numbers
