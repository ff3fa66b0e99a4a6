"""Which wrapped models live, and which of them has, and trains, a parameter.

Gradients arrive at a parameter, and not at a wrapper: two that average the same would both write
it. So whoever takes a parameter up last trains it, and any other that did is retired, for good.
That needs no word with other ranks, and what one of them has not collected as garbage yet makes no
difference to it: a wrapper is missed only by who uses it, and who does has it on all ranks alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from pydist.parallel.wrapper import DataParallel
    from pydist.parallel.wrapper_parts.shard_owners import ShardOwner

# In the order in which they were made, on all ranks alike.
_wrappers: weakref.WeakKeyDictionary[DataParallel, None] = weakref.WeakKeyDictionary()


def note_wrapper(wrapper: DataParallel) -> None:
    """Remembers one as the newest, as long as it lives."""
    _wrappers[wrapper] = None


def newest_first() -> list[DataParallel]:
    """All that live, also those that were retired."""
    # Made at once, because another thread may add one.
    references = _wrappers.keyrefs()
    return [wrapper for reference in reversed(references) if (wrapper := reference()) is not None]


def trainers_of(parameters: Iterable[Tensor]) -> list[DataParallel]:
    """Those that train any of the parameters. Each parameter is trained by one at most."""
    given = list(parameters)
    return [w for w in newest_first() if not w.is_retired and any(map(w.trains, given))]


def fitting(parameters: list[Tensor]) -> list[DataParallel]:
    """Those that have all of the parameters, and train whichever of them anybody trains.

    The newest first. One that was retired is among them only where no other has the parameters.
    What is frozen now decides nothing: who trained it once may be gone on some ranks only.
    """
    ids = {id(parameter) for parameter in parameters}
    having = [wrapper for wrapper in newest_first() if ids <= _ids_in(wrapper.module)]
    trainers = trainers_of(parameter for parameter in parameters if parameter.requires_grad)
    working = [w for w in having if not w.is_retired and all(t is w for t in trainers)]
    return working or [wrapper for wrapper in having if wrapper.is_retired]


def ids_in_any() -> set[int]:
    """Of all parameters that wrapped models have."""
    return {number for wrapper in newest_first() for number in _ids_in(wrapper.module)}


def owners_within(module: nn.Module) -> Iterator[ShardOwner]:
    """The optimizers that update shards of parameters of wrapped models that a module shares."""
    ids = _ids_in(module)
    for wrapper in newest_first():
        if not wrapper.is_retired and _ids_in(wrapper.module) & ids:
            yield from wrapper.shard_owners()


def _ids_in(module: nn.Module) -> set[int]:
    return {id(parameter) for parameter in module.parameters()}
