"""`pydist.load`: each rank reads what it needs of a checkpoint."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pydist.checkpoint.model_state as model_state
import pydist.checkpoint.optimizer_loading as optimizer_loading
import pydist.checkpoint.optimizer_state as optimizer_state
from pydist.checkpoint.manifest import (
    MANIFEST,
    config_in,
    read_manifest,
    saved_after,
    sum_of,
    verify,
)
from pydist.checkpoint.own_names import own_name, require_ranks
from pydist.checkpoint.random_states import restore_random_states
from pydist.checkpoint.replacement import absolute, find, real
from pydist.checkpoint.saves_under_way import lane_of
from pydist.checkpoint.several_by_name import (
    Part,
    parts_of,
    require_entry,
    require_loading,
    stateful_parts,
    values_of,
)
from pydist.checkpoint.verdict import agree
from pydist.config.config import Config
from pydist.errors import InvalidUsage
from pydist.job.arguments import flag

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pydist._native import Communicator
    from pydist.job.groups import Group

_CALL = "pydist.load()"


class Loaded(dict[str, Any]):
    """What `load` returns: the items of `extra`, as it was saved.

    Attributes:
        step: The step after which the checkpoint was saved; None if it was saved without one.
        path: The checkpoint's folder.
    """

    def __init__(self, extra: Mapping[str, Any], step: int | None, path: Path) -> None:
        super().__init__(extra)
        self.step = step
        self.path = path

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy or a pickle of it is a plain dictionary, which torch.load(weights_only=True) knows,
        # so it can be saved again.
        return OrderedDict, (), None, None, iter(self.items())


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizer: Optimizer | Mapping[str, Optimizer] | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    sampler: Any = None,
    stateful: Mapping[str, Any] | None = None,
    random: bool = True,
    process_group: Group | None = None,
) -> Any:
    """Reads a checkpoint of `pydist.save`, of any number of ranks. All ranks call it.

    Every file is compared with its checksum, and everything with the models and the optimizers,
    before anything is changed. A sharded optimizer's state is read and replaced one parameter's
    part at a time, so that no rank has its share twice (docs/checkpoints.md).

    What was saved by name is loaded by the same names; of several, some may be left out.

    Args:
        path: What `save` was given: of a checkpoint, or of those of steps; then the one that was
            saved last is loaded.
        model: Is changed in place, as is the rest; what is not passed is not looked at.
        optimizer: Of the class that was saved; sharded or not, in either stage.
        scheduler: Has `load_state_dict()`, as have the next two.
        scaler: Of gradients.
        sampler: A prepared loader, or a sampler.
        stateful: By name, what was saved of every rank; on as many ranks only.
        random: Whether to restore the random generators' states. A rank that there was none of when
            the checkpoint was saved keeps its own.
        process_group: The ranks; default: those of the models or the optimizers, or all.

    Returns:
        `extra`, as it was saved. Where that was a dictionary, or nothing, it is a `Loaded`: that
        dictionary, with the step as `.step` and the folder as `.path`. (`checkpoint.step_of(path)`
        tells the step of any checkpoint.)

    Raises:
        CheckpointError: There is no checkpoint, or a file is damaged; names it (on every rank). Or
            ranks had parameters, buffers or states of their own, and there were more or fewer of
            them.
        InvalidUsage: The checkpoint is of another model or optimizer, or lacks a part that was
            passed (on every rank).
        Mismatch: Ranks pass different paths, or find different checkpoints there (on every rank).
    """
    models, optimizers = parts_of("model", model), parts_of("optimizer", optimizer)
    lane = lane_of(values_of(models), values_of(optimizers), process_group)
    communicator = lane.communicator
    with lane.turn(_CALL):
        agree(communicator, _CALL, "the asynchronous save before this load", lane.settle(path))
        error: BaseException | None = None
        shared: list[Part] = []
        own: list[Part] = []
        try:
            for kind, given in (("scheduler", scheduler), ("scaler", scaler), ("sampler", sampler)):
                shared += parts_of(kind, given)
            for part in shared:
                require_loading(part)
            own = stateful_parts(stateful)
            random = flag("random", random)
        except InvalidUsage as raised:
            error = raised
        agree(communicator, _CALL, _CALL, error)
        return _load(communicator, path, models, optimizers, shared, own, random)


def _load(
    communicator: Communicator,
    path: str | os.PathLike[str],
    models: list[Part],
    optimizers: list[Part],
    shared: list[Part],
    stateful: list[Part],
    random: bool,
) -> Any:
    from pydist.checkpoint.dcp_files import Contents

    doing = f"loading the checkpoint {path}"
    error: BaseException | None = None
    named = folder = Path()
    step = None
    found = ""
    try:
        named = absolute(path)
        doing = f"loading the checkpoint {named}"
        # Where links lead, which may be elsewhere on other hosts.
        folder = find(real(named))
        step = saved_after(folder)
        files = sorted(read_manifest(folder).items())
        # Hosts with a folder each may have different checkpoints of one name.
        found = f"the checkpoint {folder.name} with {MANIFEST} of sha256 "
        found += sum_of(folder / MANIFEST).sha256
        for name, known in files[communicator.rank :: communicator.size]:
            verify(folder, name, known)
    except Exception as raised:
        error = raised
    agree(communicator, _CALL, doing, error, f"{named}, and there {found}")

    names: optimizer_state.Names = {}
    objects: dict[str, Any] = {}
    outlines: dict[str, optimizer_state.Outline] = {}
    rank = communicator.rank
    own_random = f"random.{rank}"
    try:
        names = model_state.names_in(models, rank)
        contents = Contents(folder)
        for part in (*optimizers, *shared):
            require_entry(contents, part)
        wanted = ["extra", *(part.entry for part in (*optimizers, *shared))]
        if random and own_random in contents.names:
            wanted.append(own_random)
        objects = contents.read_objects(wanted)
        concerned = []
        for part in models:
            concerned += contents.of_all_ranks(f"{part.entry}.")
        for part in optimizers:
            concerned += optimizer_state.own_in(objects[part.entry])
        for part in stateful:
            of_ranks = contents.of_all_ranks(f"{part.entry}@rank")
            if not of_ranks:
                require_entry(contents, part)
            concerned += of_ranks
        require_ranks(concerned, communicator.size, contents.saved_by)
        objects |= contents.read_objects(own_name(part.entry, rank) for part in stateful)
        for part in models:
            with part.named():
                model_state.check_fits(part, contents, rank)
        for part in optimizers:
            with part.named():
                outline = optimizer_state.outline_of(objects[part.entry], rank)
                optimizer_loading.check_fits(part.value, names, outline, rank)
            outlines[part.entry] = outline
    except Exception as raised:
        error = raised
    parts = ", ".join(part.entry for part in (*models, *optimizers, *shared, *stateful))
    agree(communicator, _CALL, doing, error, f"parts {parts}")

    try:
        masters: dict[str, optimizer_state.Master] = {}
        for part in optimizers:
            masters |= optimizer_state.masters_in(part.entry, outlines[part.entry])
        for part in models:
            model_state.put_back(part, contents, masters, rank)
            model_state.forget_late(part.value)
        for part in optimizers:
            outline = outlines[part.entry]
            optimizer_loading.put_back(part.value, part.entry, names, outline, contents, rank)
        for part in shared:
            part.value.load_state_dict(objects[part.entry])
        for part in stateful:
            part.value.load_state_dict(objects[own_name(part.entry, rank)])
        if own_random in objects:
            restore_random_states(objects[own_random])
    except Exception as raised:
        error = raised
    agree(communicator, _CALL, f"{doing} half-way, so that what was loaded is of no use,", error)
    extra = objects["extra"]
    if extra is None or isinstance(extra, dict):
        return Loaded(extra or {}, step, folder)
    return extra


def config_of(path: str | os.PathLike[str]) -> Config:
    """How the training was set up that saved a checkpoint. Talks to nobody.

    Backend and algorithm, the arguments of the wrapper, the optimizer and the loader, and the sizes
    of `pydist.initialize`, where they were no defaults; without what belongs to a machine or to a
    run (interfaces, ports, traces, logs). To go on alike: `pydist.init(config=config_of(path))`.

    Args:
        path: As for `pydist.load`.

    Raises:
        CheckpointError: There is no checkpoint, or its list of files is damaged.
        InvalidUsage: It was saved by a pydist that has names which this one does not know.
    """
    folder = find(real(path))
    return Config.from_dict(config_in(folder), str(folder))


def step_of(path: str | os.PathLike[str]) -> int | None:
    """The step after which a checkpoint was saved. Talks to nobody.

    Args:
        path: As for `pydist.load`.

    Returns:
        What `pydist.save` was given as `step`; None if nothing.

    Raises:
        CheckpointError: There is no checkpoint, or its list of files is damaged.
    """
    return saved_after(find(real(path)))
