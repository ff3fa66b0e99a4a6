"""Which wrapped models live, and which of them has a parameter. No two train the same one.

Gradients arrive at a parameter, and not at a wrapper: two that average the same would both write
it. So whoever takes a parameter up last trains it, and any other that did is retired, for good.
That needs no word with other ranks, and what one of them has not collected as garbage yet makes no
difference to it: a wrapper is missed only by who uses it, and who does has it on all ranks alike.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from pydist.parallel.wrapper import DataParallel, ShardOwner

# Keyed by numbers that grow, because the order of a set differs between ranks.
_wrappers: weakref.WeakValueDictionary[int, DataParallel] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def note_wrapper(wrapper: DataParallel) -> None:
    """Remembers one as the newest, as long as it lives."""
    _wrappers[next(_numbers)] = wrapper


def newest_first() -> list[DataParallel]:
    """All that live, also those that were retired."""
    return [wrapper for _, wrapper in sorted(_wrappers.items(), reverse=True)]


def training_too(parameters: Iterable[Tensor], taker: DataParallel) -> list[DataParallel]:
    """Those that train any of the parameters, beside the one that takes them up."""
    taken = list(parameters)
    return [
        wrapper
        for wrapper in newest_first()
        if wrapper is not taker
        and not wrapper.is_retired
        and any(wrapper.trains(parameter) for parameter in taken)
    ]


def fitting(parameters: list[Tensor]) -> list[DataParallel]:
    """Those that have all of the parameters, and train whichever of them anybody trains.

    The newest first. One that was retired is among them only where no other has the parameters.
    What is frozen now decides nothing: who trained it once may be gone on some ranks only.
    """
    wrappers = newest_first()
    for among in (
        [wrapper for wrapper in wrappers if not wrapper.is_retired],
        [wrapper for wrapper in wrappers if wrapper.is_retired],
    ):
        trained = [
            p for p in parameters if p.requires_grad and any(wrapper.trains(p) for wrapper in among)
        ]
        found = [
            wrapper
            for wrapper in among
            if all(map(wrapper.trains, trained)) and _has_all(wrapper, parameters)
        ]
        if found:
            return found
    return []


def any_has_any(parameters: list[Tensor]) -> bool:
    """Whether any of the parameters is of a wrapped model."""
    return not ids_in_any().isdisjoint(map(id, parameters))


def ids_in_any() -> set[int]:
    """Of all parameters that wrapped models have."""
    return {number for wrapper in newest_first() for number in _ids_in(wrapper.module)}


def owners_within(module: nn.Module) -> Iterator[ShardOwner]:
    """The optimizers that update shards of parameters of wrapped models that a module shares."""
    ids = _ids_in(module)
    for wrapper in newest_first():
        if not wrapper.is_retired and _ids_in(wrapper.module) & ids:
            yield from wrapper.shard_owners()


def _has_all(wrapper: DataParallel, parameters: list[Tensor]) -> bool:
    ids = _ids_in(wrapper.module)
    return all(id(parameter) in ids for parameter in parameters)


def _ids_in(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}
