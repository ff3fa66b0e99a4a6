"""Names in a checkpoint of what each rank has alone: `experts.0.weight@rank3`.

A parameter or buffer that torch calls ignored (`rank_local`) is another one on each rank, so its
name says whose it is. Such a checkpoint loads on as many ranks as have saved it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import Tensor, nn

from pydist._torch import ignored_names, is_marked_as_ignored
from pydist.errors import CheckpointError, InvalidUsage
from pydist.parallel.ownership import newest_first
from pydist.parallel.rank_local import RankLocal

_OWN = re.compile(r"(.*)@rank(\d+)")


def own_name(name: str, rank: int) -> str:
    """What a checkpoint calls something of one rank alone."""
    return f"{name}@rank{rank}"


def owner_in(name: str) -> int | None:
    """The rank that a name, or an entry that begins with one, belongs to; None: to all."""
    found = re.search(r"@rank(\d+)(?:\.|$)", name)
    return None if found is None else int(found[1])


def plain_of(name: str) -> str:
    """A name without the rank."""
    found = _OWN.fullmatch(name)
    return name if found is None else found[1]


def require_unambiguous(names: Iterable[str]) -> None:
    """Raises InvalidUsage where something of a model is called as what one rank has alone."""
    odd = next((name for name in names if owner_in(name) is not None), None)
    if odd is not None:
        raise InvalidUsage(
            f"the model has {odd}, and in a checkpoint names that end in '@rank' and a number are "
            "of what one rank has alone: call it otherwise"
        )


def own_tensors_of(module: nn.Module) -> set[int]:
    """The parameters and buffers that each rank has alone, by id.

    Those of the module, by the lists in it and in what it consists of, and those of all wrappers:
    a model may hold wrappers, or be within one.
    """
    known = [wrapper._local for wrapper in newest_first()]
    known += [RankLocal(part) for part in module.modules() if ignored_names(part)]
    return {id(tensor) for local in known for _, tensor in (*local.parameters(), *local.buffers())}


def is_own(parameter: Tensor) -> bool:
    """Whether each rank has a parameter alone, of whatever model."""
    if is_marked_as_ignored(parameter):
        return True
    return any(wrapper.has_alone(parameter) for wrapper in newest_first())


def require_ranks(names: Iterable[str], ranks: int, saved_by: int) -> None:
    """Raises CheckpointError where what ranks have alone is for another number of ranks.

    Args:
        names: Of the checkpoint's entries.
        ranks: That load it.
        saved_by: How many saved it.
    """
    own = sorted({name for name in names if owner_in(name) is not None})
    if own and ranks != saved_by:
        more = f" and {len(own) - 3} more" if len(own) > 3 else ""
        raise CheckpointError(
            f"the checkpoint was saved by {saved_by} ranks, each of which has parameters, buffers "
            f"or state of its own ({', '.join(own[:3])}{more}), so it can't be loaded by {ranks}: "
            "load it on as many ranks, or take it apart by pydist.checkpoint.to_torch(path, rank=)"
        )
