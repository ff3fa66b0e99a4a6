"""An optimizer's state by the names of parameters, whether sharded or not: what is saved of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pydist.checkpoint.own_names import is_own, own_name, owner_in
from pydist.checkpoint.who_writes_what import Piece, of_range, share_out
from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.parallel.names.state_names import distinct_names, plain_name
from pydist.sharding.optimizer import ShardedOptimizer
from pydist.sharding.state.ranges import (
    MASTER,
    ShardedState,
    from_whole,
    is_per_element,
    require_divisible,
)

# Comes between what a checkpoint calls an optimizer ("optimizer", or "optimizer.G" where there are
# several) and the names of its tensors: `optimizer.state.NAME.KEY`.
_STATE = "state"

# What a checkpoint calls the parameter itself.
MODEL = "model."

# What a model calls parameters, by their ids; None for those that it has no more.
Names = Mapping[int, str | None]

# Describes an optimizer: its groups, with the names of their parameters; and for each parameter its
# shape, the order of its dimensions, the names of its element-wise state, and the values of its
# other state. Where ranks have their own parameters, "own" holds the names in each rank's groups.
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
    require_optimizer(optimizer)
    if isinstance(optimizer, ShardedOptimizer):
        state = _renamed(optimizer, names, rank)
    else:
        state = _of_whole(optimizer, names, rank)
    return _outlined(state, root, rank, size, type_of(optimizer))


def require_optimizer(optimizer: object) -> None:
    """Raises InvalidUsage where something is no optimizer, or one whose state can't be known."""
    if not isinstance(optimizer, Optimizer):
        raise InvalidUsage(
            f"optimizer is {a_type(optimizer)}; it must be an optimizer, or a mapping of "
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
    optimizer.finish()
    local = optimizer.sharded_state()
    renaming = renaming_of(optimizer, names, rank)
    return ShardedState(
        {renaming[name]: known for name, known in local.parameters.items()},
        [{**group, "params": [renaming[n] for n in group["params"]]} for group in local.groups],
    )


def renaming_of(optimizer: ShardedOptimizer, names: Names, rank: int) -> dict[str, str]:
    """What a checkpoint calls the parameters that an optimizer has names of its own for."""
    own = [name for group in optimizer.named() for name in group]
    known = [name for group in named_in(optimizer, names, rank) for name in group]
    return dict(zip(own, known, strict=True))


def named_in(optimizer: Optimizer, names: Names, rank: int) -> list[dict[str, Tensor]]:
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
    named = named_in(optimizer, names, rank)
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
