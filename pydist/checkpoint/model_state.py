"""A model's state, under the module's own names, whatever wraps it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pydist.checkpoint.packing import pack
from pydist.checkpoint.pieces import Piece, of_rows, share_out
from pydist.data_parallel import DataParallel
from pydist.errors import InvalidUsage

if TYPE_CHECKING:
    from pydist.checkpoint.dcp_files import Contents

# What an entry of a checkpoint is called: `model.NAME`.
PREFIX = "model."


@dataclass
class Taken:
    """What a rank writes of a model's state.

    Attributes:
        pieces: Of tensors.
        objects: What is no tensor, packed.
        aliases: Second names of tensors, as of tied weights, with the first.
    """

    pieces: list[Piece]
    objects: dict[str, bytes]
    aliases: dict[str, str]


def inner(model: nn.Module) -> nn.Module:
    """The module whose names are saved.

    Raises:
        InvalidUsage: It is something else.
    """
    if not isinstance(model, nn.Module):
        raise InvalidUsage(
            f"model is a {type(model).__name__}; it must be one module: put several into an "
            "nn.ModuleDict, or into checkpoints of their own"
        )
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        wrapped: nn.Module = model.module
        return wrapped
    return model


def arrive(model: nn.Module) -> None:
    """Waits for parameters that are on their way."""
    if isinstance(model, DataParallel):
        for owner in model.shard_owners():
            owner.finish()


def note_writing(model: nn.Module) -> None:
    """All ranks are about to write the same into the parameters."""
    arrive(model)
    if isinstance(model, DataParallel):
        for owner in model.shard_owners():
            owner.note_written()


def take(model: nn.Module, rank: int, size: int) -> Taken:
    """Looks at a model's state. Talks to nobody, copies nothing.

    Parameters are the same on all ranks, which share them out. Buffers need not be: those of rank 0
    are saved.
    """
    arrive(model)
    module = inner(model)
    trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    taken = Taken([], {}, {})
    shared: list[Piece] = []
    seen: dict[tuple[object, ...], str] = {}
    for name, value in module.state_dict().items():
        entry = f"{PREFIX}{name}"
        if not isinstance(value, Tensor):
            if rank == 0:
                taken.objects[entry] = pack(f"{name} of the model's state", value)
            continue
        _require_plain(name, value)
        place = (value.data_ptr(), value.device, value.dtype, value.shape, value.stride())
        if value.numel() and place in seen:
            taken.aliases[entry] = seen[place]
            continue
        seen[place] = entry
        if name in trained:
            shared += of_rows(entry, value)
        elif rank == 0:
            taken.pieces += of_rows(entry, value)
    taken.pieces += share_out(shared, rank, size)
    return taken


def _require_plain(name: str, value: Tensor) -> None:
    if hasattr(value, "__tensor_flatten__"):  # as DTensor and other tensors made of tensors have
        raise InvalidUsage(
            f"{name} is a {type(value).__name__}, and a checkpoint takes tensors that each rank "
            "has whole: use torch.distributed.checkpoint for models that are sharded otherwise"
        )
    if value.layout != torch.strided or value.device.type == "meta":
        raise InvalidUsage(
            f"{name} is {value.layout} on {value.device}; a checkpoint holds dense tensors that "
            "have values"
        )


def check_fits(model: nn.Module, contents: Contents) -> None:
    """Whether a model can take a state.

    Raises:
        InvalidUsage: It has other names or shapes.
    """
    state = inner(model).state_dict()
    for name, value in state.items():
        if isinstance(value, Tensor):
            _require_plain(name, value)
    ours = {f"{PREFIX}{name}" for name in state}
    theirs = {name for name in contents.names if name.startswith(PREFIX)}
    if ours != theirs:
        missing = sorted(name.removeprefix(PREFIX) for name in ours - theirs)
        extra = sorted(name.removeprefix(PREFIX) for name in theirs - ours)
        raise InvalidUsage(
            "the checkpoint is of another model: "
            + "; ".join(
                f"{what} {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"
                for what, names in (("it lacks", missing), ("the model lacks", extra))
                if names
            )
        )
    for name, value in state.items():
        entry = contents.tensor(f"{PREFIX}{name}")
        found = None if entry is None else tuple(entry.size)
        own = tuple(value.shape) if isinstance(value, Tensor) else None
        if found != own:
            raise InvalidUsage(
                f"the checkpoint's {name} is of shape {found}, and the model's is {own}"
            )


def put_back(model: nn.Module, contents: Contents) -> None:
    """Reads a state into a model, which `check_fits`: tensors in place."""
    note_writing(model)
    module = inner(model)
    state = module.state_dict()
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    contents.read_tensors(
        (f"{PREFIX}{name}", (0,) * value.dim(), value.detach()) for name, value in tensors.items()
    )
    objects = contents.read_objects(f"{PREFIX}{name}" for name in state if name not in tensors)
    state.update({name.removeprefix(PREFIX): value for name, value in objects.items()})
    # What is in place stays there; the module's hooks get to see the rest.
    module.load_state_dict(state)


def read_whole(contents: Contents) -> dict[str, object]:
    """A model's state as torch's modules have it."""
    names = sorted(name for name in contents.names if name.startswith(PREFIX))
    state: dict[str, object] = {}
    for name in names:
        entry = contents.tensor(name)
        if entry is not None:
            value = torch.empty(entry.size, dtype=entry.properties.dtype)
            contents.read_tensors([(name, (0,) * value.dim(), value)])
            state[name.removeprefix(PREFIX)] = value
        else:
            state[name.removeprefix(PREFIX)] = contents.read_objects([name])[name]
    return state
