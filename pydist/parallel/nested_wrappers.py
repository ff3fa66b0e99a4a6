"""Refuses models that two wrappers would average: ours within ours, or beside torch's.

Two wrappers that average one gradient leave values that are the same on all ranks and wrong, so no
comparison of ranks finds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pydist._torch import active_torch_wrapper, children_of, runs_uncompiled_throughout
from pydist.errors import InvalidUsage

if TYPE_CHECKING:
    from pydist.parallel.wrapper import DataParallel


def refuse_wrapped(module: nn.Module, wrapper_class: type[DataParallel]) -> None:
    """Raises InvalidUsage where a module is a wrapped model, or has one as a part.

    Args:
        module: To be wrapped.
        wrapper_class: `pydist.DataParallel`.
    """
    for name, part in _parts(module):
        where = f"{name} of the module" if name else "the module"
        if isinstance(part, wrapper_class):
            raise InvalidUsage(
                f"{where} is a pydist.DataParallel already, and two can't average one gradient: "
                "wrap the outermost module alone (the inner one's own is its .module)"
            )
        if isinstance(part, DistributedDataParallel):
            raise InvalidUsage(
                f"{where} is a torch DistributedDataParallel already, and two can't average one "
                "gradient: wrap the plain module, which is its .module. Where a library has "
                "wrapped it, as Accelerate's prepare() and Trainers do, let either the library or "
                "pydist.DataParallel wrap the model, not both"
            )


@runs_uncompiled_throughout
def refuse_active_torch(wrapper: DataParallel) -> None:
    """Raises InvalidUsage where a DistributedDataParallel that runs forward holds a wrapper."""
    active = active_torch_wrapper()
    # Another thread's may run, which has nothing to do with this one's model.
    if active is None or all(part is not wrapper for _, part in _parts(active)):
        return
    raise InvalidUsage(
        "torch's DistributedDataParallel was put around a pydist.DataParallel, and two can't "
        "average one gradient. Accelerate's prepare() and Trainers do so with a model that is "
        "wrapped already: give them the plain module (model.module), and let either them or "
        "pydist.DataParallel wrap it"
    )


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and those within it, by path: also wrappers, which `modules()` passes over."""
    seen = set()
    left = [("", module)]
    while left:
        path, part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        left += [
            (f"{path}{'.' if path else ''}{name}", child)
            for name, child in children_of(part).items()
            if child is not None
        ]
