"""`pydist.save`: each rank writes its part of a checkpoint."""

from __future__ import annotations

import functools
import os
import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pydist.checkpoint.model_state as model_state
import pydist.checkpoint.optimizer_state as optimizer_state
from pydist._load import __version__
from pydist.checkpoint.lanes import Lane, Saving, lane_of
from pydist.checkpoint.manifest import SEQUENCE, FileSum, sum_of, write_manifest
from pydist.checkpoint.packing import pack, unpack
from pydist.checkpoint.pieces import Piece
from pydist.checkpoint.random_states import random_states
from pydist.checkpoint.replacement import (
    absolute,
    begin,
    forget_older,
    next_sequence,
    partial_of,
    publish,
    real,
    require_no_checkpoint,
    step_folder,
)
from pydist.checkpoint.verdict import agree, exchange
from pydist.errors import CheckpointError, InvalidUsage

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    import pydist.checkpoint.dcp_files as dcp_files
    from pydist._native import Communicator
    from pydist.groups import Group

_CALL = "pydist.save()"


@dataclass
class _Part:
    """What this rank writes."""

    pieces: list[Piece] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    # Of the optimizer, packed: training goes on while it is written.
    outline: bytes | None = None


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    extra: Any = None,
    step: int | None = None,
    keep: int | None = None,
    asynchronous: bool = False,
    process_group: Group | None = None,
) -> Saving:
    """Writes a checkpoint, which loads on any number of ranks. All ranks call it.

    Each rank writes its part. The random generators' states are saved as well, of every rank. What
    was at `path` is replaced once all of the new checkpoint is on the disk: whatever happens, the
    old or the new one is there, whole.

    Args:
        path: A folder that all ranks can reach. With `step`, the checkpoint is in
            `path/step-000123`.
        model: On any wrapper; saved under the module's own names. Parameters are the same on all
            ranks; buffers are those of rank 0. Those that each rank has alone (torch calls them
            ignored) are saved of every rank, and load on as many ranks only.
        optimizer: A `pydist.ShardedOptimizer`, or one that is the same on all ranks. Its state goes
            by the model's present names: pass both. Parameters that were taken out of the model are
            left out.
        scheduler: Has `state_dict()`, as have the next two; that of rank 0 is saved.
        scaler: Of gradients.
        sampler: A prepared loader, or a sampler.
        extra: Numbers, text, tensors, and containers of them; that of rank 0 is saved.
        step: The number of the step after which it is.
        keep: How many checkpoints of steps stay, those saved last, this one among them; default:
            all.
        asynchronous: Whether to return once everything is copied, and to write in a thread. One
            save is under way at a time: the next one, `load` and the end of the process wait.
        process_group: The ranks; default: those of the model or the optimizer, or all.

    Returns:
        A handle, whose `wait()` returns when the checkpoint is written; done unless `asynchronous`.

    Raises:
        CheckpointError: Some rank could not write, now or in the asynchronous save before this one
            (on every rank). What was at `path` before still is.
        InvalidUsage: An argument is not supported (on every rank).
        Mismatch: Ranks pass different paths or settings (on every rank).

    Example:
        >>> import pydist, tempfile, torch
        >>> model = pydist.DataParallel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pydist.save(folder + "/checkpoint", model=model, extra={"epoch": 3})
        ...     pydist.load(folder + "/checkpoint", model=model)
        {'epoch': 3}
    """
    lane = lane_of(model, optimizer, process_group)
    with lane.turn(_CALL):
        error = lane.settle(path)
        agree(lane.communicator, _CALL, "the asynchronous save before this one", error)
        stateful = {"scheduler": scheduler, "scaler": scaler, "sampler": sampler}
        given = {"model": model, "optimizer": optimizer, **stateful}
        named = top = Path()
        part = _Part()
        try:
            named = absolute(path)
            # A link stays where it is; what it leads to is replaced.
            top = real(named)
            _check(top, step, keep)
            part = _collect(lane.communicator, model, optimizer, stateful, extra)
            if asynchronous:
                part.pieces = [piece.copy() for piece in part.pieces]
        except Exception as raised:
            error = raised
        present = [name for name, value in given.items() if value is not None]
        facts = f"path={str(named)!r}, {step=}, {keep=}, {asynchronous=}"
        agree(lane.communicator, _CALL, _CALL, error, f"{facts}, with {', '.join(present)}")
        place = top if step is None else step_folder(top, step)

        older = None
        if keep is not None and step is not None:
            older = functools.partial(forget_older, top, keep, step)
        saving = Saving(place)
        lane.last = saving
        saving.run(lambda: _write(lane, place, part, older), asynchronous=asynchronous)
        return saving


def _check(top: Path, step: int | None, keep: int | None) -> None:
    if step is None and not top.name:
        raise InvalidUsage(
            f"path={str(top)!r} can't be replaced by a checkpoint: pass a folder in it"
        )
    if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
        raise InvalidUsage(f"step={step!r} is not valid; it must be a whole number >= 0")
    if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
        raise InvalidUsage(f"keep={keep!r} is not valid; it must be a whole number >= 1")
    if step is not None:
        require_no_checkpoint(top)
    if keep is not None and step is None:
        raise InvalidUsage("keep= counts checkpoints of steps: pass step= as well")


def _collect(
    communicator: Communicator,
    model: nn.Module | None,
    optimizer: Optimizer | None,
    stateful: dict[str, Any],
    extra: Any,
) -> _Part:
    rank, size = communicator.rank, communicator.size
    part = _Part()
    if model is not None:
        taken = model_state.take(model, rank, size)
        part.pieces += taken.pieces
        part.objects |= taken.objects
        part.aliases = taken.aliases
    if optimizer is not None:
        names = {} if model is None else model_state.names_in(model, rank)
        found = optimizer_state.take(optimizer, names, rank, size)
        part.pieces += found.pieces
        part.outline = pack("the optimizer's state", found.outline)
    part.objects[f"random.{rank}"] = pack("random states", random_states())
    if rank == 0:
        for name, value in stateful.items():
            if value is not None:
                part.objects[name] = pack(f"the {name}'s state", value.state_dict())
        part.objects["extra"] = pack("extra", extra)
    return part


def _write(lane: Lane, place: Path, part: _Part, forget: Callable[[], None] | None) -> None:
    communicator = lane.communicator
    rank = communicator.rank
    partial = partial_of(place)
    with lane.turn(f"writing the checkpoint {place}"):
        try:
            outlines = [] if part.outline is None else exchange(communicator, _CALL, part.outline)
            if rank == 0:
                _agreed(communicator, place, lambda: _begin(place, part, outlines))
            else:
                _agreed(communicator, place)
            own = _agreed(communicator, place, lambda: _write_own(partial, rank, part))
            told = exchange(communicator, _CALL, pickle.dumps(own))
            if rank == 0:
                everybody = [pickle.loads(each) for each in told]
                _agreed(communicator, place, lambda: _complete(place, everybody, part.aliases))
                _agreed(communicator, place, forget)
            else:
                _agreed(communicator, place)
                _agreed(communicator, place)
        except (CheckpointError, InvalidUsage):
            if rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _begin(place: Path, part: _Part, outlines: list[bytes]) -> None:
    if outlines:
        whole = optimizer_state.merged([unpack(each) for each in outlines])
        part.objects["optimizer"] = pack("the optimizer's state", whole)
    begin(place)


def _write_own(partial: Path, rank: int, part: _Part) -> tuple[dcp_files.Written, FileSum]:
    import pydist.checkpoint.dcp_files as dcp_files

    if not partial.is_dir():
        raise CheckpointError(
            f"{partial}, which rank 0 has made, is not here: all ranks must see the same folder"
        )
    try:
        written = dcp_files.write_file(partial, rank, part.pieces, part.objects)
    except RuntimeError as error:
        # torch's writer of archives does not say what the system told it.
        raise CheckpointError(
            f"{partial / dcp_files.file_of(rank)} can't be written, with "
            f"{shutil.disk_usage(partial).free} bytes free on its disk: {error}"
        ) from error
    return written, sum_of(partial / dcp_files.file_of(rank))


def _complete(
    place: Path, everybody: list[tuple[dcp_files.Written, FileSum]], aliases: dict[str, str]
) -> None:
    import pydist.checkpoint.dcp_files as dcp_files

    partial = partial_of(place)
    dcp_files.write_metadata(partial, [written for written, _ in everybody], aliases)
    files = {dcp_files.file_of(rank): known for rank, (_, known) in enumerate(everybody)}
    files[dcp_files.METADATA] = sum_of(partial / dcp_files.METADATA)
    facts = {"pydist": __version__, "torch": str(torch.__version__), "ranks": len(everybody)}
    if (sequence := next_sequence(place)) is not None:
        facts[SEQUENCE] = sequence
    write_manifest(partial, files, facts)
    publish(place)


def _agreed(communicator: Communicator, place: Path, work: Callable[[], Any] | None = None) -> Any:
    """What this rank's part of a phase returns, once all ranks have done theirs."""
    error: BaseException | None = None
    done = None
    try:
        done = None if work is None else work()
    except Exception as raised:
        error = raised
    agree(communicator, _CALL, f"writing the checkpoint {place}", error)
    return done
