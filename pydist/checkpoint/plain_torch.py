"""Between checkpoints of pydist and dictionaries as torch's own classes have them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

import pydist.checkpoint.model_state as model_state
import pydist.checkpoint.optimizer_loading as optimizer_loading
import pydist.checkpoint.optimizer_state as optimizer_state
from pydist.checkpoint.manifest import read_manifest, verify
from pydist.checkpoint.own_names import owner_in, plain_of
from pydist.checkpoint.replacement import find, real
from pydist.checkpoint.saves_under_way import settle_at
from pydist.checkpoint.several_by_name import SHARED_KINDS, STATEFUL, Part, parts_of
from pydist.errors import InvalidUsage
from pydist.sharding.optimizer import ShardedOptimizer

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pydist.checkpoint.dcp_files import Contents

# What entries of states that ranks have of their own begin with.
_STATEFUL = f"{STATEFUL}."


def to_torch(path: str | os.PathLike[str], *, rank: int | None = None) -> dict[str, Any]:
    """Reads a checkpoint into plain dictionaries, all of it. Talks to nobody.

    Args:
        path: As for `pydist.load`.
        rank: Of what each rank had alone (torch calls it ignored), whose is taken, under its plain
            names; needed only where there is such. With it, "stateful" has that rank's, too.

    Returns:
        What was saved of "model", "optimizer", "scheduler", "scaler", "sampler" and "extra": for
        `load_state_dict` of an unwrapped module and of the unsharded optimizer over the same groups
        of parameters; of several, a dictionary by name. Without the float32 copies of parameters in
        16 bits, which torch's classes have no place for.

    Raises:
        CheckpointError: There is none, a file is damaged, or an asynchronous save there, which this
            waits for, has failed.
        InvalidUsage: Ranks had parameters or buffers of their own, and `rank` is none of them.
    """
    contents = opened(path)
    own = sorted(
        name
        for name in contents.names
        if owner_in(name) is not None and (rank is not None or not name.startswith(_STATEFUL))
    )
    if own and rank not in range(contents.saved_by):
        raise InvalidUsage(
            f"the checkpoint has what each of {contents.saved_by} ranks had alone, such as "
            f"{own[0]}, and rank={rank}: pass the number of the rank whose it shall be"
        )
    state: dict[str, Any] = {}
    for kind in ("model", "optimizer", *SHARED_KINDS, "extra"):
        names = contents.parts.get(kind)
        if names is not None:
            state[kind] = {name: _read(contents, f"{kind}.{name}", rank or 0) for name in names}
        elif kind in contents.names or contents.of_all_ranks(f"{kind}."):
            state[kind] = _read(contents, kind, rank or 0)
    mine = [name for name in own if name.startswith(_STATEFUL) and owner_in(name) == rank]
    if mine:
        found = contents.read_objects(mine)
        state[STATEFUL] = {plain_of(n).removeprefix(_STATEFUL): found[n] for n in mine}
    return state


def opened(path: str | os.PathLike[str]) -> Contents:
    """A checkpoint to read from, once no save is under way there and its files are verified.

    Raises:
        CheckpointError: There is none, a file is damaged, or an asynchronous save there has failed.
    """
    from pydist.checkpoint.dcp_files import Contents

    place = real(path)
    error = settle_at(place)
    if error is not None:
        raise error
    folder = find(place)
    for name, known in read_manifest(folder).items():
        verify(folder, name, known)
    return Contents(folder)


def _read(contents: Contents, entry: str, rank: int) -> Any:
    """What a checkpoint has under a name of a kind, or of one of several."""
    kind = entry.partition(".")[0]
    if kind == "model":
        return model_state.read_whole(contents, entry, rank)
    found = contents.read_objects([entry])[entry]
    if kind == "optimizer":
        outline = optimizer_state.outline_of(found, rank)
        return optimizer_loading.whole_state(entry, outline, contents)
    return found


def from_torch(
    state: Mapping[str, Any] | str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
) -> None:
    """Loads what plain torch has saved. Every rank calls it, with the same; talks to nobody.

    Args:
        state: "model", with or without the `module.` that torch's DistributedDataParallel puts
            before names, and what `torch.compile` puts into them; and "optimizer", of the unsharded
            class: `state_dict()`, which torch's ZeroRedundancyOptimizer has after
            `consolidate_state_dict()`. Of several, dictionaries by name. Or a file of `torch.save`
            with such a dictionary.
        model: Wrapped or not; several by name, as for `pydist.save`.
        optimizer: Over the same groups of parameters, sharded or not; several by name. One of
            torch's takes tensors as they are, as in its `load_state_dict`, and will write into
            them.

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
    models = [(part, _found(plain, part)) for part in parts_of("model", model)]
    optimizers = [(part, _found(plain, part)) for part in parts_of("optimizer", optimizer)]
    for part, theirs in optimizers:
        with part.named():
            optimizer_loading.check_torchs(part.value, theirs)
    with contextlib.ExitStack() as whole_or_not:
        for part, theirs in models:
            with part.named():
                whole_or_not.enter_context(model_state.unchanged_by_errors(part.value))
                model_state.load_torchs(part.value, theirs)
        for part, theirs in optimizers:
            if not isinstance(part.value, ShardedOptimizer):
                theirs = optimizer_loading.laid_out(part.value, theirs)
            part.value.load_state_dict(theirs)


def _found(plain: Mapping[str, Any], part: Part) -> Any:
    """What a dictionary has for an object."""
    found: Any = plain
    for name in [part.kind] if part.key is None else [part.kind, part.key]:
        if not isinstance(found, Mapping) or name not in found:
            has = ", ".join(map(repr, found)) if isinstance(found, Mapping) else "no names"
            raise InvalidUsage(
                f"the state has no {part.label}, but {has or 'nothing'}: pass a dictionary of "
                "'model' and 'optimizer', and dictionaries by name in these for several"
            )
        found = found[name]
    return found
