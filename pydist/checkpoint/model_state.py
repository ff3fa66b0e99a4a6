"""A model's state, under the module's own names, whatever wraps it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import pydist.checkpoint.optimizer_state as optimizer_state
from pydist._torch import uncompiled
from pydist.checkpoint.own_names import own_name, own_tensors_of, plain_of, require_unambiguous
from pydist.checkpoint.packing import pack
from pydist.checkpoint.several_by_name import Part, what_it_has
from pydist.checkpoint.who_writes_what import Piece, of_rows, share_out
from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type
from pydist.parallel.names.state_names import matched, plain_names
from pydist.parallel.ownership import owners_within, trainers_of
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.buckets import SHORT

if TYPE_CHECKING:
    from pydist.checkpoint.dcp_files import Contents

# An entry of a checkpoint is named `model.NAME`, or `model.G.NAME` where there are several models
# and this one is "G". The name of a parameter is then `G.NAME` everywhere.
PREFIX = "model."

# Where a tensor is, and how it lies there.
_Place = tuple[object, ...]


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
            f"model is {a_type(model)}; it must be a module, or a mapping of names to modules"
        )
    module: nn.Module = uncompiled(model)
    while isinstance(module, (DataParallel, DistributedDataParallel)):
        module = uncompiled(module.module)
    return module


def names_in(parts: Iterable[Part], rank: int) -> optimizer_state.Names:
    """What a checkpoint calls the parameters of models; None: those that were taken out of them."""
    names: dict[int, str | None] = {}
    removed: set[int] = set()
    for part in parts:
        with part.named():
            module = inner(part.value)
        wrapper = uncompiled(part.value)
        named = dict(module.named_parameters())
        plain = plain_names(module, named)
        own = own_tensors_of(module)
        for name, parameter in named.items():
            known = f"{part.entry}.{plain[name]}".removeprefix(PREFIX)
            # Several models may share a parameter.
            names.setdefault(
                id(parameter), own_name(known, rank) if id(parameter) in own else known
            )
        if isinstance(wrapper, DataParallel):
            removed.update(id(parameter) for parameter in wrapper.removed())
    return {**dict.fromkeys(removed), **names}


def settle(models: Iterable[Part]) -> None:
    """Waits for what GPUs tell late of the steps until now.

    Raises:
        FloatingPointError: A gradient was not finite, and is looked for.
        InvalidUsage: A weight was none.
    """
    for part in models:
        with part.named():
            module = inner(part.value)
        for wrapper in trainers_of(module.parameters()):
            wrapper._settle()


def forget_late(model: nn.Module) -> None:
    """Lets wrappers tell of nothing that was before: other values are loaded."""
    for wrapper in trainers_of(inner(model).parameters()):
        wrapper._forget_late()


def arrive(model: nn.Module) -> None:
    """Waits for parameters that are on their way."""
    for owner in owners_within(inner(model)):
        owner.finish()


def own_writes(models: Iterable[Part]) -> str:
    """What this rank's program has written into parameters of which all ranks have one copy."""
    owners = [owner for part in models for owner in owners_within(inner(part.value))]
    return "; ".join(written for owner in owners if (written := owner.own_writes()))


def take(part: Part, rank: int, size: int, seen: dict[_Place, str]) -> Taken:
    """Looks at a model's state. Talks to nobody, copies nothing.

    Parameters are the same on all ranks, which share them out. Buffers need not be: those of rank 0
    are saved. What a rank has alone, it writes.

    Args:
        part: The model.
        rank: This one.
        size: The number of ranks.
        seen: What models before this one have taken, as several may share it; this adds to it.
    """
    model = part.value
    arrive(model)
    module = inner(model)
    state = module.state_dict()
    require_unambiguous(state)
    own = _own_names(model)
    entries = _entries(part, state, rank)
    trained = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    taken = Taken([], {}, {})
    shared: list[Piece] = []
    for name, value in state.items():
        entry = entries[name]
        if not isinstance(value, Tensor):
            if rank == 0:
                taken.objects[entry] = pack(f"{name} of the model's state", value)
            continue
        _require_plain(name, value)
        if name in own:
            taken.pieces += of_rows(entry, value)
            continue
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


def _entries(part: Part, state: dict[str, Any], rank: int) -> dict[str, str]:
    """What a checkpoint calls the tensors and objects of a model's state."""
    plain = plain_names(inner(part.value), state)
    own = _own_names(part.value)
    return {
        name: f"{part.entry}.{own_name(known, rank) if name in own else known}"
        for name, known in plain.items()
    }


def _own_names(model: nn.Module) -> set[str]:
    """The names in a model's state of what each rank has alone."""
    module = inner(model)
    own = own_tensors_of(module)
    named: list[tuple[str, Tensor]] = list(module.named_parameters(remove_duplicate=False))
    named += module.named_buffers(remove_duplicate=False)
    return {name for name, tensor in named if id(tensor) in own}


def _require_plain(name: str, value: Tensor) -> None:
    if hasattr(value, "__tensor_flatten__"):  # as DTensor and other tensors made of tensors have
        raise InvalidUsage(
            f"{name} is {a_type(value)}, and a checkpoint takes tensors that each rank "
            "has whole: use torch.distributed.checkpoint for models that are sharded otherwise"
        )
    if value.layout != torch.strided or value.device.type == "meta":
        raise InvalidUsage(
            f"{name} is {value.layout} on {value.device}; a checkpoint holds dense tensors that "
            "have values"
        )


def check_fits(part: Part, contents: Contents, rank: int) -> None:
    """Whether a model can take a state, with this rank's part of it.

    Raises:
        InvalidUsage: It has other names or shapes.
    """
    state = inner(part.value).state_dict()
    entries = _entries(part, state, rank)
    for name, value in state.items():
        if isinstance(value, Tensor):
            _require_plain(name, value)
    ours = set(entries.values())
    root = f"{part.entry}."
    theirs = set(contents.of_rank(rank, root))
    if ours != theirs:
        missing = sorted(name.removeprefix(root) for name in ours - theirs)
        extra = sorted(name.removeprefix(root) for name in theirs - ours)
        is_several = bool(contents.parts.get(part.kind))
        raise InvalidUsage(
            "the checkpoint is of another model: "
            + "; ".join(
                f"{what} {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}"
                for what, names in (("it lacks", missing), ("the model lacks", extra))
                if names
            )
            + (f". {what_it_has(contents, part.kind)}" if is_several else "")
        )
    for name, value in state.items():
        entry = contents.tensor(entries[name])
        found = None if entry is None else tuple(entry.size)
        own = tuple(value.shape) if isinstance(value, Tensor) else None
        if found != own:
            raise InvalidUsage(
                f"the checkpoint's {name} is of shape {found}, and the model's is {own}"
            )


def put_back(
    part: Part, contents: Contents, masters: Mapping[str, optimizer_state.Master], rank: int
) -> None:
    """Reads a state into a model, which `check_fits`: tensors in place. All ranks have met before.

    Args:
        part: The model, wrapped or not.
        contents: Of the checkpoint.
        masters: The float32 copies that parameters have there: a parameter in more than 16 bits
            takes the copy.
        rank: Whose part of the state it is.
    """
    with contextlib.ExitStack() as loading:
        for owner in owners_within(inner(part.value)):
            loading.enter_context(owner.loading())
        _put_back(part, contents, masters, rank)


def _put_back(
    part: Part, contents: Contents, masters: Mapping[str, optimizer_state.Master], rank: int
) -> None:
    module = inner(part.value)
    state = module.state_dict()
    entries = _entries(part, state, rank)
    tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    contents.read_tensors(
        (entries[name], (0,) * value.dim(), value.detach()) for name, value in tensors.items()
    )
    for name, value in tensors.items():
        master = masters.get(entries[name].removeprefix(PREFIX))
        if master is not None and value.dtype not in SHORT:
            whole = value.detach().permute(master.dims)
            widen(whole, entries[name], master.entry, contents)
    objects = contents.read_objects(entries[name] for name in state if name not in tensors)
    state.update({name: objects[entries[name]] for name in state if name not in tensors})
    # What is in place stays there; the module's hooks get to see the rest.
    module.load_state_dict(state)


def load_torchs(model: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Loads what a module's `state_dict()` was in plain torch, whatever had wrapped it there.

    Raises:
        InvalidUsage: It is of another model, which may be half-loaded: see `unchanged_by_errors`.
    """
    arrive(model)
    module = inner(model)
    try:
        module.load_state_dict(matched(state_dict, module))
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise InvalidUsage(f"the state is of another model. {' '.join(lines)}") from error


@contextlib.contextmanager
def unchanged_by_errors(model: nn.Module) -> Iterator[None]:
    """Gives a model the values back that it had, where what is done to it raises."""
    arrive(model)
    state = {n: v for n, v in inner(model).state_dict().items() if isinstance(v, Tensor)}
    before = {name: value.detach().clone() for name, value in state.items()}
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for name, value in before.items():
                state[name].copy_(value)
        raise


def widen(value: Tensor, entry: str, master_entry: str, contents: Contents) -> None:
    """Takes the float32 copy of a parameter that was in 16 bits, where those are its rounding."""
    rounded = contents.require_tensor(entry)
    master = torch.empty(value.numel(), dtype=torch.float32)
    contents.read_tensors([(master_entry, (0,), master)])
    wide = master.view(value.shape).to(value.device, value.dtype)
    value.copy_(torch.where(wide.to(rounded.properties.dtype) == value, wide, value))


def read_whole(contents: Contents, root: str, rank: int) -> dict[str, object]:
    """A model's state as torch's modules have it, on one rank.

    Args:
        contents: Of the checkpoint.
        root: What it calls the model.
        rank: Whose part of it is read.
    """
    state: dict[str, object] = {}
    for name in sorted(contents.of_rank(rank, f"{root}.")):
        state[plain_of(name.removeprefix(f"{root}."))] = read_value(contents, name)
    return state


def read_value(contents: Contents, entry: str) -> Any:
    """What a checkpoint has under a name: a tensor, all of it, or an object."""
    known = contents.tensor(entry)
    if known is None:
        return contents.read_objects([entry])[entry]
    value = torch.empty(known.size, dtype=known.properties.dtype)
    contents.read_tensors([(entry, (0,) * value.dim(), value)])
    return value
