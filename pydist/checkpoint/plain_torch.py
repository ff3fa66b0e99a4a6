"""Between checkpoints of pydist and dictionaries as torch's own classes have them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import pydist.checkpoint.model_state as model_state
import pydist.checkpoint.optimizer_state as optimizer_state
from pydist.checkpoint.lanes import settle_at
from pydist.checkpoint.manifest import read_manifest, verify
from pydist.checkpoint.own_names import owner_in
from pydist.checkpoint.replacement import find, real
from pydist.errors import InvalidUsage
from pydist.sharded_optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_OBJECTS = ("scheduler", "scaler", "sampler", "extra")


def to_torch(path: str | os.PathLike[str], *, rank: int | None = None) -> dict[str, Any]:
    """Reads a checkpoint into plain dictionaries, all of it. Talks to nobody.

    Args:
        path: As for `pydist.load`.
        rank: Of what each rank had alone (torch calls it ignored), whose is taken, under its plain
            names; needed only where there is such.

    Returns:
        What was saved of "model", "optimizer", "scheduler", "scaler", "sampler" and "extra": for
        `load_state_dict` of an unwrapped module and of the unsharded optimizer over the same groups
        of parameters. Without the float32 copies of parameters in 16 bits, which torch's classes
        have no place for.

    Raises:
        CheckpointError: There is none, a file is damaged, or an asynchronous save there, which this
            waits for, has failed.
        InvalidUsage: Ranks had parameters or buffers of their own, and `rank` is none of them.
    """
    from pydist.checkpoint.dcp_files import Contents

    place = real(path)
    error = settle_at(place)
    if error is not None:
        raise error
    folder = find(place)
    for name, known in read_manifest(folder).items():
        verify(folder, name, known)
    contents = Contents(folder)
    own = sorted(name for name in contents.names if owner_in(name) is not None)
    if own and rank not in range(contents.saved_by):
        raise InvalidUsage(
            f"the checkpoint has what each of {contents.saved_by} ranks had alone, such as "
            f"{own[0]}, and rank={rank}: pass the number of the rank whose it shall be"
        )
    rank = rank or 0
    state: dict[str, Any] = {}
    model = model_state.read_whole(contents, rank)
    if model:
        state["model"] = model
    if "optimizer" in contents.names:
        outline = contents.read_objects(["optimizer"])["optimizer"]
        outline = optimizer_state.outline_of(outline, rank)
        state["optimizer"] = optimizer_state.whole_state(outline, contents)
    state |= contents.read_objects(name for name in _OBJECTS if name in contents.names)
    return state


def from_torch(
    state: Mapping[str, Any] | str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
) -> None:
    """Loads what plain torch has saved. Every rank calls it, with the same; talks to nobody.

    Args:
        state: "model", with or without the `module.` that torch's DistributedDataParallel puts
            before names, and what `torch.compile` puts into them; and "optimizer", of the unsharded
            class: `state_dict()`, which torch's ZeroRedundancyOptimizer has after
            `consolidate_state_dict()`. Or a file of `torch.save` with such a dictionary.
        model: Wrapped or not.
        optimizer: Over the same groups of parameters, sharded or not. One of torch's takes tensors
            as they are, as in its `load_state_dict`, and will write into them.

    Raises:
        InvalidUsage: The state lacks a part, is of other parameters or, by the options of its
            groups, of another class of optimizers; or it is a part of a state, as
            ZeroRedundancyOptimizer has it before `consolidate_state_dict()`. Nothing has changed.
    """
    plain: Mapping[str, Any]
    if isinstance(state, Mapping):
        plain = state
    else:
        plain = torch.load(state, map_location="cpu", weights_only=True)
    for name, target in (("model", model), ("optimizer", optimizer)):
        if target is not None and name not in plain:
            raise InvalidUsage(
                f"the state has no {name!r}, but {', '.join(map(repr, plain)) or 'nothing'}: pass "
                "a dictionary of 'model' and 'optimizer'"
            )
    if optimizer is not None:
        optimizer_state.check_torchs(optimizer, plain["optimizer"])
    with contextlib.ExitStack() as whole_or_not:
        if model is not None:
            whole_or_not.enter_context(model_state.unchanged_by_errors(model))
            model_state.load_torchs(model, plain["model"])
        if optimizer is not None:
            theirs = plain["optimizer"]
            if not isinstance(optimizer, ShardedOptimizer):
                theirs = optimizer_state.laid_out(optimizer, theirs)
            optimizer.load_state_dict(theirs)
