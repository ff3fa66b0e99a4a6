"""Refuses models that two wrappers would average: ours within ours, or beside torch's.

Two wrappers that average one gradient leave values that are the same on all ranks and wrong, so no
comparison of ranks finds them.

Note [Who wraps what]
A wrapper may come around another one, or into it, at any time. Ours looks through the module when
it is made, and again before the first forward after any module was given a part. Torch's are seen
when they are made: torch tells of each module that becomes a part of another, and a wrapper's own
module is one. What torch's wrapper then takes, it trains: see `ownership.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pydist._torch import (
    StandIn,
    active_torch_wrapper,
    children_of,
    ignored_names,
    is_replicated,
    runs_uncompiled_throughout,
)
from pydist.errors import InvalidUsage
from pydist.parallel.ownership import trainers_of

_TWO_AVERAGES = (
    "torch's DistributedDataParallel was put around a pydist.DataParallel, and two can't average "
    "one gradient. Accelerate's prepare() and Trainers do so with a model that is wrapped already: "
    "give them the plain module (model.module), and let either them or pydist.DataParallel wrap it"
)
_COPIES_IN_THREADS = (
    "torch.nn.DataParallel was put around a pydist.DataParallel: it computes with copies of the "
    "module, one for each GPU, whose gradients the wrapper never sees. Leave it out, and start a "
    "process for each GPU (pydist run --gpus)"
)


def refuse_wrapped(module: nn.Module) -> None:
    """Raises InvalidUsage where a module that one of ours has, or is to have, holds a wrapper."""
    for name, part in _parts(module):
        where = f"{name} of the module" if name else "the module"
        if isinstance(part, StandIn):
            raise InvalidUsage(
                f"{where} is a pydist.DataParallel already, and two can't average one gradient: "
                "wrap the outermost module alone (the inner one's own is its .module)"
            )
        if is_replicated(part):
            raise InvalidUsage(
                f"{where} is averaged by torch's replicate() already, and two can't average one "
                "gradient: leave one of them out"
            )
        if isinstance(part, DistributedDataParallel):
            raise InvalidUsage(
                f"{where} is a torch DistributedDataParallel already, and two can't average one "
                "gradient: wrap the plain module, which is its .module. Where a library has "
                "wrapped it, as Accelerate's prepare() and Trainers do, let either the library or "
                "pydist.DataParallel wrap the model, not both"
            )


@runs_uncompiled_throughout
def refuse_active_torch(wrapper: StandIn) -> None:
    """Raises InvalidUsage where a DistributedDataParallel that runs forward holds a wrapper.

    That is one into which the wrapper came later.
    """
    active = active_torch_wrapper()
    # Another thread's may run, which has nothing to do with this one's model.
    if active is not None and any(part is wrapper for _, part in _parts(active)):
        raise InvalidUsage(_TWO_AVERAGES)


_is_looking = False


def look_at_torchs_wrappers() -> None:
    """From now on, torch's wrappers are seen when they are made; see Note [Who wraps what]."""
    global _is_looking
    if not _is_looking:
        nn.modules.module.register_module_module_registration_hook(_before_registration)
        _is_looking = True


def _before_registration(outer: nn.Module, _name: str, inner: nn.Module | None) -> None:
    if inner is None or not isinstance(outer, (DistributedDataParallel, nn.DataParallel)):
        return
    averages = isinstance(outer, DistributedDataParallel)
    if any(isinstance(part, StandIn) for _, part in _parts(inner)):
        raise InvalidUsage(_TWO_AVERAGES if averages else _COPIES_IN_THREADS)
    if averages:
        ignored = ignored_names(inner)
        parameters = [
            parameter
            for name, parameter in inner.named_parameters()
            if parameter.requires_grad and name not in ignored
        ]
        for wrapper in trainers_of(parameters):
            wrapper.retire(parameters, "given to torch's DistributedDataParallel")


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
