"""`pydist.save`: each rank writes its part of a checkpoint."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import pydist.checkpoint.model_state as model_state
import pydist.checkpoint.optimizer_state as optimizer_state
from pydist._load import __version__
from pydist.checkpoint.manifest import (
    CONFIG,
    METADATA,
    SEQUENCE,
    STEP,
    FileSum,
    sum_of,
    write_manifest,
)
from pydist.checkpoint.own_names import own_name
from pydist.checkpoint.packing import pack, unpack
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
from pydist.checkpoint.same_state import require_same_state
from pydist.checkpoint.saves_under_way import Lane, Saving, lane_of
from pydist.checkpoint.several_by_name import (
    PARTS,
    SHARED_KINDS,
    Part,
    names_of,
    parts_of,
    state_of,
    stateful_parts,
    values_of,
)
from pydist.checkpoint.verdict import KnownToAll, agree
from pydist.checkpoint.who_writes_what import Piece
from pydist.config import in_force
from pydist.errors import CheckpointError, InvalidUsage
from pydist.job import phases
from pydist.job.arguments import flag
from pydist.job.outcome import exchange

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pydist._native import Communicator
    from pydist.job.groups import Group

_CALL = "pydist.save()"


@dataclass
class _Part:
    """The part of a checkpoint that this rank writes."""

    pieces: list[Piece] = field(default_factory=list)
    objects: dict[str, bytes] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    # Of optimizers, by their entries. Packed: training goes on while they are written.
    outlines: dict[str, bytes] = field(default_factory=dict)
    # How the training is set up now: an asynchronous save writes it later.
    config: dict[str, Any] = field(default_factory=dict)


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    stateful: Mapping[str, Any] | None = None,
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

    Of models, optimizers, schedulers, scalers and samplers there may be several, by name, as in
    `model={"G": generator, "D": critic}`.

    Args:
        path: A folder that all ranks can reach. With `step`, the checkpoint is in
            `path/step-000123`.
        model: On any wrapper; saved under the module's own names. Parameters are the same on all
            ranks; buffers are those of rank 0. Those that each rank has alone (torch calls them
            ignored) are saved of every rank, and load on as many ranks only.
        optimizer: A `pydist.ShardedOptimizer`, or one that is the same on all ranks. Its state goes
            by the models' present names: pass both. Parameters that were taken out of a model are
            left out.
        scheduler: Has `state_dict()`, as have the next two, which is the same on all ranks.
        scaler: Of gradients.
        sampler: A prepared loader, or a sampler.
        stateful: By name, what has a state of its own on each rank, and `state_dict()` and
            `load_state_dict()` for it, as torch.distributed.checkpoint's `Stateful`: a loader of
            another library, say. Saved of every rank; loads on as many ranks only.
        extra: Numbers, text, tensors, and containers of them; that of rank 0 is saved.
        step: The number of the step after which it is.
        keep: How many checkpoints of steps stay, those saved last, this one among them; default:
            all.
        asynchronous: Whether to return once everything is copied, and to write in a thread. One
            save is under way at a time: the next one, `load` and the end of the process wait.
        process_group: The ranks; default: those of the models or the optimizers, or all.

    Returns:
        A handle, whose `wait()` returns when the checkpoint is written; done unless `asynchronous`.

    Raises:
        CheckpointError: Some rank could not write, now or in the asynchronous save before this one
            (on every rank). What was at `path` before still is.
        InvalidUsage: An argument is not supported, or a state holds what could not be loaded
            without running code (on every rank).
        Mismatch: Ranks pass different paths or settings, or the state of a scheduler, scaler or
            sampler differs between them (on every rank).

    Example:
        >>> import pydist, tempfile, torch
        >>> model = pydist.DataParallel(torch.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pydist.save(folder + "/checkpoint", model=model, extra={"epoch": 3})
        ...     pydist.load(folder + "/checkpoint", model=model)
        {'epoch': 3}
    """
    models, optimizers = parts_of("model", model), parts_of("optimizer", optimizer)
    lane = lane_of(values_of(models), values_of(optimizers), process_group)
    with lane.turn(_CALL):
        error = lane.settle(path)
        agree(lane.communicator, _CALL, "the asynchronous save before this one", error)
        given = {
            "model": model,
            "optimizer": optimizer,
            "scheduler": scheduler,
            "scaler": scaler,
            "sampler": sampler,
            "stateful": stateful,
        }
        named = top = Path()
        written = ""
        part = _Part()
        parts: list[Part] = []
        states: list[tuple[Part, Any]] = []
        try:
            named = absolute(path)
            # A link stays where it is; what it leads to is replaced.
            top = real(named)
            _check(top, step, keep)
            asynchronous = flag("asynchronous", asynchronous)
            of_all = [p for kind in SHARED_KINDS for p in parts_of(kind, given[kind])]
            of_each = stateful_parts(stateful)
            parts = [*models, *optimizers, *of_all, *of_each]
            states = [(p, state_of(p)) for p in of_all]
            part = _collect(lane.communicator, models, optimizers, states, of_each, extra)
            # After what all ranks do together: it may raise on one of them.
            model_state.settle(models)
            # Each rank saves a part of the parameters, so all must have the same values.
            if own := model_state.own_writes(models):
                written = f", {own}"
            part.config = in_force.to_save()
            if several := names_of(given):
                part.objects |= {PARTS: pack("names", several)}
            if asynchronous:
                part.pieces = [piece.copy() for piece in part.pieces]
        except Exception as raised:
            error = raised
        facts = f"path={str(named)!r}, {step=}, {keep=}, {asynchronous=}{written}"
        present = ", ".join(p.entry for p in parts)
        agree(lane.communicator, _CALL, _CALL, error, f"{facts}, with {present}")
        for p, state in states:
            require_same_state(lane.communicator, p, state)
        place = top if step is None else step_folder(top, step)

        older = None
        if keep is not None and step is not None:
            older = functools.partial(forget_older, top, keep, step)
        saving = Saving(place)
        lane.last = saving
        saving.run(lambda: _write(lane, place, part, step, older), asynchronous=asynchronous)
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
    models: list[Part],
    optimizers: list[Part],
    states: list[tuple[Part, Any]],
    stateful: list[Part],
    extra: Any,
) -> _Part:
    rank, size = communicator.rank, communicator.size
    part = _Part()
    seen: dict[tuple[object, ...], str] = {}
    for model in models:
        with model.named():
            taken = model_state.take(model, rank, size, seen)
        part.pieces += taken.pieces
        part.objects |= taken.objects
        part.aliases |= taken.aliases
    names = model_state.names_in(models, rank)
    for optimizer in optimizers:
        with optimizer.named():
            found = optimizer_state.take(optimizer.value, optimizer.entry, names, rank, size)
            part.outlines[optimizer.entry] = pack("the optimizer's state", found.outline)
        part.pieces += found.pieces
    part.objects[f"random.{rank}"] = pack("random states", random_states())
    for each in stateful:
        packed = pack(f"the state of {each.label}", state_of(each))
        part.objects[own_name(each.entry, rank)] = packed
    for each, state in states:
        packed = pack(f"the state of {each.label}", state)
        if rank == 0:
            part.objects[each.entry] = packed
    if rank == 0:
        part.objects["extra"] = pack("extra", extra)
    return part


def _write(
    lane: Lane, place: Path, part: _Part, step: int | None, forget: Callable[[], None] | None
) -> None:
    communicator = lane.communicator
    rank = communicator.rank
    leads = rank == 0
    partial = partial_of(place)
    with lane.turn(f"writing the checkpoint {place}"):
        try:
            outlines = {
                entry: exchange(communicator, outline, _CALL)
                for entry, outline in part.outlines.items()
            }
            begin_it = functools.partial(_begin, place, part, outlines)
            _agreed(communicator, place, begin_it if leads else None)
            own = _agreed(communicator, place, lambda: _write_own(partial, rank, part))
            told = exchange(communicator, own, _CALL)
            complete = functools.partial(_complete, place, told, part.aliases, part.config, step)
            _agreed(communicator, place, complete if leads else None)
            _agreed(communicator, place, forget if leads else None)
        except (CheckpointError, InvalidUsage, KnownToAll):
            if leads:
                shutil.rmtree(partial, ignore_errors=True)
            raise


def _begin(place: Path, part: _Part, outlines: dict[str, list[bytes]]) -> None:
    for entry, packed in outlines.items():
        whole = optimizer_state.merged([unpack(each) for each in packed])
        part.objects[entry] = pack("the optimizer's state", whole)
    begin(place)


def _write_own(partial: Path, rank: int, part: _Part) -> bytes:
    """Writes this rank's file; returns what rank 0 has to know of it."""
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
    file = partial / dcp_files.file_of(rank)
    known = sum_of(file)
    phases.reach(phases.CHECKPOINT, file)
    return pack(
        "what was written", ([tuple(entry) for entry in written], known.bytes, known.sha256)
    )


def _complete(
    place: Path,
    told: list[bytes],
    aliases: dict[str, str],
    config: dict[str, Any],
    step: int | None,
) -> None:
    import pydist.checkpoint.dcp_files as dcp_files

    everybody = [unpack(each) for each in told]
    partial = partial_of(place)
    parts = [[dcp_files.Entry(*entry) for entry in written] for written, *_ in everybody]
    dcp_files.write_metadata(partial, parts, aliases)
    files = {dcp_files.file_of(rank): FileSum(*known) for rank, (_, *known) in enumerate(everybody)}
    for rank, (name, known) in enumerate(files.items()):
        _require_here(partial / name, rank, known)
    files[METADATA] = sum_of(partial / METADATA)
    facts: dict[str, Any] = {
        "pydist": __version__,
        "torch": str(torch.__version__),
        "ranks": len(everybody),
    }
    if step is not None:
        facts[STEP] = step
    if (sequence := next_sequence(place)) is not None:
        facts[SEQUENCE] = sequence
    # Last of the facts, since the others are looked for at the beginning of the file.
    facts[CONFIG] = config
    write_manifest(partial, files, facts)
    publish(place)


def _require_here(file: Path, rank: int, known: FileSum) -> None:
    """Raises where another host has written into a folder of its own, which had the same name."""
    if not file.is_file() or file.stat().st_size != known.bytes:
        raise CheckpointError(
            f"{file}, of which rank {rank} has written {known.bytes} bytes, is not here, or not "
            "all of it: all ranks must see the same folder"
        )


def _agreed(communicator: Communicator, place: Path, work: Callable[[], Any] | None = None) -> Any:
    """Does this rank's part of a phase; returns its result once all ranks have done theirs."""
    error: BaseException | None = None
    done = None
    try:
        done = None if work is None else work()
    except Exception as raised:
        error = raised
    agree(communicator, _CALL, f"writing the checkpoint {place}", error)
    return done
