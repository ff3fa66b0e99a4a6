"""Gives an optimizer, whether sharded or not, the state that a checkpoint has of it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.sharding.buckets import SHORT, dense_strides
from pydist.sharding.optimizer import ShardedOptimizer
from pydist.sharding.state.ranges import (
    MASTER,
    ParameterState,
    ShardedState,
    StateRange,
    matching_groups,
    require_divisible,
    to_whole,
)
from pydist.sharding.state.torch_state_dict import (
    from_unsharded,
    is_sharded,
    renamed,
    require_form,
    require_options_of,
    without_absent,
)
from pydist.sharding.step.element_wise import require_plain_options

if TYPE_CHECKING:
    from pydist.checkpoint.dcp_files import Contents

from pydist.checkpoint.optimizer_state import (
    MODEL,
    Names,
    Outline,
    entry_of,
    named_in,
    renaming_of,
    require_optimizer,
    type_of,
)


def check_fits(optimizer: Optimizer, names: Names, outline: Outline, rank: int) -> None:
    """Whether an optimizer can take a state, of which the outline is this rank's.

    Raises:
        InvalidUsage: It is of another class, of other parameters or groups, or has options that the
            optimizer does not take, or values that can't be cut into shards.
    """
    require_optimizer(optimizer)
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
    named = named_in(optimizer, names, rank)
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
        renaming = renaming_of(optimizer, names, rank)
        sources = {name: Source(contents, outline, name) for name in renaming.values()}
        state = shards(optimizer, root, renaming, sources, outline["groups"])
        optimizer.load_sharded_state(state)
        return
    named = named_in(optimizer, names, rank)
    known = _of_all(optimizer, named, outline, whole_state(root, outline, contents))
    optimizer.load_state_dict(laid_out(optimizer, known))


@dataclass(frozen=True)
class Source:
    """Where the state of a parameter is.

    Attributes:
        contents: Of which checkpoint.
        outline: Of the optimizer in it.
        name: What that calls the parameter.
    """

    contents: Contents
    outline: Outline
    name: str

    @property
    def entry(self) -> dict[str, Any]:
        """What the outline says of the parameter."""
        found: dict[str, Any] = self.outline["parameters"][self.name]
        return found


def shards(
    optimizer: ShardedOptimizer,
    root: str,
    renaming: Mapping[str, str],
    sources: Mapping[str, Source],
    groups: list[dict[str, Any]],
) -> ShardedState:
    """What this rank needs of a state, for `optimizer.load_sharded_state`. Talks to nobody.

    Tensors are read whenever they are asked for. So an optimizer takes the state over segment by
    segment, each read when its turn comes; where reading fails, it has taken a part.

    Args:
        optimizer: Which will have it.
        root: What checkpoints call it.
        renaming: What a checkpoint calls the parameters that the optimizer has names of its own
            for.
        sources: By those names in a checkpoint. A parameter that has none was never updated.
        groups: With these names.
    """
    optimizer.finish()
    local = optimizer.sharded_state()
    with_masters = {
        own
        for own, known in local.parameters.items()
        if any(MASTER in piece.values for piece in known.ranges)
    }
    shapes = {own: known.shape for own, known in local.parameters.items()}
    # What is replaced is to be freed at once.
    del local
    parameters = {}
    for own, (dims, ranges) in optimizer.ranges().items():
        source = sources.get(renaming[own])
        if source is None:
            parameters[own] = ParameterState(shapes[own], dims)
            continue
        contents, name = source.contents, source.name
        parameters[own] = _read(contents, root, name, source.entry, dims, ranges)
        if own in with_masters:
            _add_masters(contents, name, parameters[own], dims, ranges)
    back = {name: own for own, name in renaming.items()}
    return ShardedState(parameters, renamed(groups, back))


def read_at_once(state: ShardedState) -> None:
    """Reads all tensors of what `shards` gave, so that it is known what is wrong with files."""
    for known in state.parameters.values():
        known.ranges = [StateRange(r.begin, r.end, dict(r.values)) for r in known.ranges]


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

    def whole() -> Iterator[tuple[Mapping[str, Any], list[Any]]]:
        for position, group in enumerate(optimizer.param_groups):
            loaded = group
            numbers: Iterator[int] = iter(())
            if position in matching:
                loaded = known["param_groups"][matching[position]]
                numbers = iter(loaded["params"])
            present = {id(parameter) for parameter in named[position].values()}
            yield (
                loaded,
                [
                    known["state"].get(next(numbers))
                    if id(parameter) in present
                    else optimizer.state.get(parameter)
                    for parameter in group["params"]
                ],
            )

    return numbered(whole())


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
    return numbered(
        (
            group,
            [
                state_of_parameter(root, name, outline, group["params"], contents)
                for name in group["params"]
            ],
        )
        for group in outline["groups"]
    )


def numbered(groups: Iterable[tuple[Mapping[str, Any], Sequence[Any]]]) -> dict[str, Any]:
    """A state as torch's unsharded class has it.

    Args:
        groups: The options of each, and the states of its parameters; empty or None: it has none.
    """
    state: dict[int, Any] = {}
    described = []
    number = 0
    for options, states in groups:
        numbers = list(range(number, number + len(states)))
        number += len(numbers)
        state.update((n, values) for n, values in zip(numbers, states, strict=True) if values)
        described.append({**options, "params": numbers})
    return {"state": state, "param_groups": described}


def state_of_parameter(
    root: str, name: str, outline: Outline, group: list[str], contents: Contents
) -> dict[str, Any]:
    """The state of one parameter, of a group with these names, as torch's unsharded class has it.

    Empty where the parameter was never updated.
    """
    entry = outline["parameters"][name]
    count = math.prod(entry["shape"])
    dims = tuple(entry["dims"])
    values = to_whole(name, _read(contents, root, name, entry, dims, [(0, count)]))
    if count == 0 and not values:
        values = _of_no_elements(root, entry["shape"], outline, group, contents)
    return values


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
        # The stored order is another one, so a range's elements are all over the parameter.
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
    entry = contents.require_tensor(stored)

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
    """Of a parameter that had more than 16 bits, and so no float32 copy: itself is one."""
    entry = contents.tensor(f"{MODEL}{name}")
    if entry is None or entry.properties.dtype in SHORT:
        return
    if any(MASTER in piece.values for piece in state.ranges):
        return
    if not state.ranges:
        state.dims = dims
        state.ranges = [StateRange(begin, end, _Values({}, {})) for begin, end in ranges]

    def read(begin: int, end: int) -> Tensor:
        whole = torch.empty(entry.size, dtype=torch.float32)
        contents.read_tensors([(f"{MODEL}{name}", (0,) * whole.dim(), whole)])
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
