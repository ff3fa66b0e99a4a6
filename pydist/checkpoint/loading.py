"""`pydist.load`: each rank reads what it needs of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydist.checkpoint.model_state as model_state
import pydist.checkpoint.optimizer_state as optimizer_state
from pydist.checkpoint.lanes import lane_of
from pydist.checkpoint.manifest import read_manifest, verify
from pydist.checkpoint.own_names import require_ranks
from pydist.checkpoint.random_states import restore_random_states
from pydist.checkpoint.replacement import absolute, find, real
from pydist.checkpoint.verdict import agree
from pydist.errors import InvalidUsage

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pydist._native import Communicator
    from pydist.groups import Group

_CALL = "pydist.load()"


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    random: bool = True,
    process_group: Group | None = None,
) -> Any:
    """Reads a checkpoint of `pydist.save`, of any number of ranks. All ranks call it.

    Every file is compared with its checksum, and everything with the model and the optimizer,
    before anything is changed. A sharded optimizer's state is read and replaced one parameter's
    part at a time, so that no rank has its share twice (docs/checkpoints.md).

    Args:
        path: What `save` was given: of a checkpoint, or of those of steps; then the one that was
            saved last is loaded.
        model: Is changed in place, as is the rest; what is not passed is not looked at.
        optimizer: Of the class that was saved; sharded or not, in either stage.
        scheduler: Has `load_state_dict()`, as have the next two.
        scaler: Of gradients.
        sampler: A prepared loader, or a sampler.
        random: Whether to restore the random generators' states. A rank that there was none of when
            the checkpoint was saved keeps its own.
        process_group: The ranks; default: those of the model or the optimizer, or all.

    Returns:
        `extra`, as it was saved.

    Raises:
        CheckpointError: There is no checkpoint, or a file is damaged; names it (on every rank). Or
            ranks had parameters or buffers of their own, and there were more or fewer of them.
        InvalidUsage: The checkpoint is of another model or optimizer, or lacks a part that was
            passed (on every rank).
        Mismatch: Ranks pass different paths, or find different checkpoints there (on every rank).
    """
    lane = lane_of(model, optimizer, process_group)
    communicator = lane.communicator
    with lane.turn(_CALL):
        agree(communicator, _CALL, "the asynchronous save before this load", lane.settle(path))
        stateful = {"scheduler": scheduler, "scaler": scaler, "sampler": sampler}
        present = {name: value for name, value in stateful.items() if value is not None}
        return _load(communicator, path, model, optimizer, present, random)


def _load(
    communicator: Communicator,
    path: str | os.PathLike[str],
    model: nn.Module | None,
    optimizer: Optimizer | None,
    stateful: dict[str, Any],
    random: bool,
) -> Any:
    from pydist.checkpoint.dcp_files import Contents

    doing = f"loading the checkpoint {path}"
    error: BaseException | None = None
    named = folder = Path()
    try:
        named = absolute(path)
        doing = f"loading the checkpoint {named}"
        # Where links lead, which may be elsewhere on other hosts.
        folder = find(real(named))
        files = sorted(read_manifest(folder).items())
        for name, known in files[communicator.rank :: communicator.size]:
            verify(folder, name, known)
    except Exception as raised:
        error = raised
    agree(communicator, _CALL, doing, error, f"{named}, and a checkpoint in {folder.name}")

    names: optimizer_state.Names = {}
    objects: dict[str, Any] = {}
    outline: optimizer_state.Outline = {}
    rank = communicator.rank
    own = f"random.{rank}"
    try:
        if model is not None:
            names = model_state.names_in(model, rank)
        contents = Contents(folder)
        wanted = ["extra", *stateful, *(["optimizer"] if optimizer is not None else [])]
        for name in wanted:
            if name not in contents.names:
                raise InvalidUsage(f"the checkpoint has no {name}: it was saved without one")
        if random and own in contents.names:
            wanted.append(own)
        objects = contents.read_objects(wanted)
        concerned = [] if model is None else contents.of_all_ranks(model_state.PREFIX)
        if optimizer is not None:
            concerned += optimizer_state.own_in(objects["optimizer"])
        require_ranks(concerned, communicator.size, contents.saved_by)
        if model is not None:
            model_state.check_fits(model, contents, rank)
        if optimizer is not None:
            outline = optimizer_state.outline_of(objects["optimizer"], rank)
            optimizer_state.check_fits(optimizer, names, outline, rank)
    except Exception as raised:
        error = raised
    agree(communicator, _CALL, doing, error, f"parts {', '.join(stateful)}")

    try:
        if model is not None:
            masters = {}
            if optimizer is not None:
                masters = optimizer_state.masters_in(outline)
            model_state.put_back(model, contents, masters, rank)
        if optimizer is not None:
            optimizer_state.put_back(optimizer, names, outline, contents, rank)
        for name, value in stateful.items():
            value.load_state_dict(objects[name])
        if own in objects:
            restore_random_states(objects[own])
    except Exception as raised:
        error = raised
    agree(communicator, _CALL, f"{doing} half-way, so that what was loaded is of no use,", error)
    if model is not None:
        model_state.note_settled(model)
    return objects["extra"]
