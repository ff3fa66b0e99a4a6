"""Refuses models that two wrappers would average: ours within ours, or beside torch's.

Two wrappers that average one gradient leave values that are the same on all ranks and wrong, so no
comparison of ranks finds them.

Note [Who wraps what]
A wrapper may come around another one, or into it, at any time. Ours looks through the module when
it is made, and again before the first forward after any module was given a part. Torch's are seen
while they are made: torch tells of each module that becomes a part of another, and a wrapper's own
module is one. What torch's wrapper then takes, it trains from its first forward on, because until
then making it may still fail.

Note [Frozen wrappers]
A wrapper that has nothing to train averages nothing. So one of ours that is frozen may be a part of
a model that is wrapped: a teacher, say. It is looked at again once it trains.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel, replicate
from torch.utils.hooks import RemovableHandle

from pydist._torch import (
    StandIn,
    active_torch_wrapper,
    before_first_use,
    children_of,
    ignored_names,
    is_about_to_shard,
    is_fully_sharded,
    is_replicated,
    runs_uncompiled_throughout,
)
from pydist.errors import Error, InvalidUsage
from pydist.parallel.ownership import newest_first, owners_within, trainers_of

_TWO_AVERAGES = (
    "torch's DistributedDataParallel was put around a pydist.DataParallel, and two can't average "
    "one gradient. Accelerate's prepare() and Trainers do so with a model that is wrapped already: "
    "give them the plain module (model.module), and let either them or pydist.DataParallel wrap "
    "it. If the inner one is a copy that is not to train, freeze it by requires_grad_(False)"
)
_COPIES_IN_THREADS = (
    "torch.nn.DataParallel, or torch.nn.parallel.replicate(), was given a pydist.DataParallel: it "
    "computes with copies of the module, one for each GPU, whose gradients the wrapper never sees. "
    "Leave it out, and start a process for each GPU (pydist run --gpus)"
)
_SHARDS = (
    "torch's FullyShardedDataParallel, or fully_shard, was given a pydist.DataParallel or a model "
    "with one in it, and two can't average one gradient. Nothing is cut into shards yet: give it "
    "the plain module, which is the wrapper's .module, and leave the wrapper out. "
    "pydist.DataParallel with a pydist.ShardedOptimizer(..., stage=2) shards gradients and the "
    "optimizer's state"
)

# Of the file of torch's that makes copies of a module for several GPUs.
_GLOBALS_OF_COPYING = vars(sys.modules[replicate.__module__])


def refuse_wrapped(module: nn.Module) -> None:
    """Raises InvalidUsage where a module that one of ours has, or is to have, holds a wrapper.

    But for Note [Frozen wrappers].
    """
    for name, part in parts_by_path(module):
        where = f"{name} of the module" if name else "the module"
        if isinstance(part, StandIn) and (not name or _has_to_train(part)):
            raise InvalidUsage(
                f"{where} is a pydist.DataParallel already, and two can't average one gradient: "
                "wrap the outermost module alone (the inner one's own is its .module). If it is a "
                "copy that is not to train, an average of the weights say, freeze it by "
                "requires_grad_(False)"
            )
        if is_replicated(part):
            raise InvalidUsage(
                f"{where} is averaged by torch's replicate() already, and two can't average one "
                "gradient: leave one of them out"
            )
        if is_fully_sharded(part):
            raise InvalidUsage(
                f"{where} is a torch FullyShardedDataParallel already, of which each rank has "
                "another shard, and pydist.DataParallel averages parameters that are whole on "
                "every rank: leave one of them out. pydist.DataParallel around the plain module, "
                "with a pydist.ShardedOptimizer(..., stage=2), shards gradients and the "
                "optimizer's state"
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

    That is one into which the wrapper came later, or whose wrapper was frozen until now.
    """
    active = active_torch_wrapper()
    # Another thread's may run, which has nothing to do with this one's model.
    is_within = active is not None and any(part is wrapper for _, part in parts_by_path(active))
    if is_within and _has_to_train(wrapper):
        raise InvalidUsage(_TWO_AVERAGES)


def refuse_copying_and_sharding() -> None:
    """Raises InvalidUsage where torch asks the caller for its parts, to copy or to shard them.

    torch goes through the modules that it is about to copy, and then looks up the parts of each
    among the copies. There is none of a wrapper: `modules()` passes over it. To shard them, torch
    looks for the modules whose parameters it is about to cut.
    """
    if torch.compiler.is_compiling():
        return  # the frames are those of the compiler
    asking = sys._getframe(2).f_globals
    if asking is _GLOBALS_OF_COPYING:
        raise InvalidUsage(_COPIES_IN_THREADS)
    if is_about_to_shard(asking):
        raise InvalidUsage(_SHARDS)


_is_looking = False


def look_at_torchs_wrappers() -> None:
    """From now on, torch's wrappers are seen when they are made; see Note [Who wraps what]."""
    global _is_looking
    if not _is_looking:
        nn.modules.module.register_module_module_registration_hook(_before_registration)
        _is_looking = True


def _before_registration(outer: nn.Module, _name: str, inner: nn.Module | None) -> None:
    if inner is None:
        return
    if isinstance(outer, DistributedDataParallel):
        _before_averaging(outer, inner)
    elif isinstance(outer, nn.DataParallel):
        if any(isinstance(part, StandIn) for _, part in parts_by_path(inner)):
            raise InvalidUsage(_COPIES_IN_THREADS)
    elif is_fully_sharded(outer):
        _before_sharding(inner)


# The hooks that wait for the first forward of torch's wrappers, which take parameters of ours then.
_waiting: weakref.WeakKeyDictionary[nn.Module, RemovableHandle] = weakref.WeakKeyDictionary()


def _before_averaging(outer: DistributedDataParallel, inner: nn.Module) -> None:
    if any(isinstance(part, StandIn) and _has_to_train(part) for _, part in parts_by_path(inner)):
        raise InvalidUsage(_TWO_AVERAGES)
    if not trainers_of(_trained_by_torch(inner)):
        return
    for owner in owners_within(inner):
        with contextlib.suppress(Error):  # of a group that failed; then nothing arrives
            owner.finish()  # because torch copies the parameters at once
    # torch's replicate() wraps a list of parameters, and calls no forward of that wrapper.
    if isinstance(inner, nn.ParameterList):
        before_first_use(outer, lambda: _take_over(inner))
    else:
        _waiting[outer] = outer.register_forward_pre_hook(_before_first_forward)


@runs_uncompiled_throughout
def _before_first_forward(outer: DistributedDataParallel, _arguments: Any) -> None:
    # A copy of a wrapper has the hook as well, and another module.
    hook = _waiting.pop(outer, None)
    if hook is not None:
        hook.remove()
        _take_over(outer.module)


def _take_over(module: nn.Module) -> None:
    """Retires whichever of ours trains what torch's wrapper of a module trains."""
    parameters = _trained_by_torch(module)
    for wrapper in trainers_of(parameters):
        wrapper.retire(parameters, "given to torch's DistributedDataParallel")


def _trained_by_torch(module: nn.Module) -> list[Tensor]:
    ignored = ignored_names(module)
    return [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and name not in ignored
    ]


def _before_sharding(inner: nn.Module) -> None:
    """Comes when torch has put shards in the place of the parameters."""
    sharded = {id(part) for _, part in parts_by_path(inner)}
    for wrapper in newest_first():
        if any(id(part) in sharded for _, part in parts_by_path(wrapper.module)):
            wrapper.retire(None, "given to torch's FullyShardedDataParallel")


def _has_to_train(wrapper: StandIn) -> bool:
    return any(parameter.requires_grad for parameter in wrapper.parameters())


def parts_by_path(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
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
