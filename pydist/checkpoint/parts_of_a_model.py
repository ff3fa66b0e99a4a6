"""From checkpoints of a model's parts into parts that are cut otherwise."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

import pydist.checkpoint.model_state as model_state
import pydist.checkpoint.optimizer_loading as optimizer_loading
import pydist.checkpoint.optimizer_state as optimizer_state
from pydist.checkpoint.manifest import saved_after
from pydist.checkpoint.own_names import owner_in
from pydist.checkpoint.plain_torch import from_torch, opened
from pydist.checkpoint.several_by_name import Part, is_several, what_it_has
from pydist.errors import InvalidUsage
from pydist.parallel.names.state_names import plain_names
from pydist.sharding.buckets import SHORT
from pydist.sharding.optimizer import ShardedOptimizer
from pydist.sharding.state.ranges import require_divisible
from pydist.sharding.step.element_wise import require_plain_options

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pydist.checkpoint.dcp_files import Contents

_OPTIMIZER = "optimizer"

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Origin:
    """Where the optimizer's state of a parameter is, and the group that has the parameter there."""

    source: optimizer_loading.Source
    group: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        return {key: value for key, value in self.group.items() if key != "params"}


@dataclass(frozen=True)
class _Outlined:
    """A checkpoint, and what it says of its optimizer; None: it was saved without one."""

    contents: Contents
    outline: optimizer_state.Outline | None


def from_parts(
    paths: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
) -> None:
    """Loads a part of a model from checkpoints of its parts, which may have been cut otherwise.

    Of a pipeline's stages, say, each saved by `pydist.save(path, model=part, optimizer=optimizer)`:
    four of them into two, or into the whole model. Every rank calls it, for its own part; talks to
    nobody: where it raises on one rank, others may have loaded their parts. A rank has all values
    of its part for a moment, and the optimizer's state, of its shards alone where that is sharded
    and parameters have the layout in memory that they were saved in. A parameter in more than 16
    bits takes the float32 copy that a sharded optimizer had of it, as in `pydist.load`.

    Args:
        paths: Of all parts, as for `pydist.load`; or one path. A part whose parameters are all
            frozen may have been saved without an optimizer.
        model: The part, wrapped or not. Parts have the names of the whole model, when they are
            saved and here: `nn.Sequential(OrderedDict(list(whole.named_children())[2:4]))`.
        optimizer: Over parameters of `model`; sharded or not, of the class that was saved. The
            options of its groups become those that the parameters' groups had.

    Raises:
        CheckpointError: There is none at a path, or a file is damaged. Nothing has changed.
        InvalidUsage: No part has a parameter or a buffer, or two have it with different values, or
            with an optimizer's state each; the parts were saved after different steps; the
            optimizer is of another class, or one group has parameters whose groups had different
            options; weights that are tied here have different values. Nothing has changed.
        OSError: A file can't be read. Nothing has changed.

    Example:
        >>> paths = [folder / f"stage{i}" for i in range(4)]  # doctest: +SKIP
        >>> from_parts(paths, model=model, optimizer=optimizer)  # doctest: +SKIP
    """
    for what, given in (("model", model), (_OPTIMIZER, optimizer)):
        if is_several(given):
            raise InvalidUsage(
                f"{what} is a mapping, and from_parts loads one part: call it for each, with "
                f"{what}= by itself"
            )
    every = [paths] if isinstance(paths, (str, os.PathLike)) else paths
    parts = [opened(path) for path in every]
    _require_one_step(parts)
    outlined = [_Outlined(part, _outline_in(part)) for part in parts]
    state = {"model": _model_in(outlined, model)}
    if optimizer is None:
        from_torch(state, model=model)
        return
    named, found, groups = _groups_for(outlined, model, optimizer)
    if not isinstance(optimizer, ShardedOptimizer):
        whole = optimizer_loading.numbered(
            (group, [_whole(found.get(name)) for name in group["params"]]) for group in groups
        )
        from_torch({**state, _OPTIMIZER: whole}, model=model, optimizer=optimizer)
        return
    own = [name for group in optimizer.named() for name in group]
    renaming = dict(zip(own, [name for group in named for name in group], strict=True))
    sources = {name: origin.source for name, origin in found.items()}
    shards = optimizer_loading.shards(optimizer, _OPTIMIZER, renaming, sources, groups)
    optimizer_loading.read_at_once(shards)
    with model_state.unchanged_by_errors(model):
        from_torch(state, model=model)
        optimizer.load_sharded_state(shards)


def _require_one_step(parts: Sequence[Contents]) -> None:
    if not parts:
        raise InvalidUsage("paths is empty: pass the checkpoints of all parts of the model")
    steps = {part.folder: saved_after(part.folder) for part in parts}
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{folder} after {step}" for folder, step in steps.items())
        raise InvalidUsage(
            f"the parts were saved after different steps, {told}: pass folders of one step, such "
            "as stage0/step-000010 and stage1/step-000010"
        )


def _outline_in(part: Contents) -> optimizer_state.Outline | None:
    if _OPTIMIZER not in part.names:
        return None
    outline: optimizer_state.Outline = part.read_objects([_OPTIMIZER])[_OPTIMIZER]
    return outline


# -- the model


def _model_in(parts: Sequence[_Outlined], model: nn.Module) -> dict[str, Any]:
    """A module's state under its plain names, from whichever parts have it."""
    module = model_state.inner(model)
    own = module.state_dict()
    state: dict[str, Any] = {}
    tied: dict[tuple[object, ...], str] = {}
    for name, plain in plain_names(module, own).items():
        mine = own[name]
        value = state[plain] = _value_in(parts, plain, mine)
        if not isinstance(mine, Tensor) or not mine.numel():
            continue
        place = (mine.data_ptr(), mine.device, mine.dtype, mine.shape, mine.stride())
        first = tied.setdefault(place, plain)
        if first != plain and not _equal(state[first], value):
            raise InvalidUsage(
                f"the model has one tensor as {first} and {plain}, and the parts have different "
                "values of these: tie the weights in the model that saves, too, or untie them here"
            )
    return state


def _value_in(parts: Sequence[_Outlined], name: str, mine: object) -> Any:
    """What the parts have under a plain name, which must be the same where several have it."""
    entry = f"{model_state.PREFIX}{name}"
    _require_shared(name, entry, parts)
    having = [part for part in parts if entry in part.contents.names]
    first, *others = _required(name, having or None, parts)
    value = model_state.read_value(first.contents, entry)
    for other in others:
        if not _equal(value, model_state.read_value(other.contents, entry)):
            raise InvalidUsage(
                f"{first.contents.folder} and {other.contents.folder} both have {name}, with "
                "different values: pass each part once, and let parts have the names of the whole "
                "model, such as 2.weight and not 0.weight"
            )
    if isinstance(mine, Tensor) and mine.dtype not in SHORT and isinstance(value, Tensor):
        return _widened(first, entry, value, mine.dtype)
    return value


def _widened(part: _Outlined, entry: str, value: Tensor, dtype: torch.dtype) -> Tensor:
    """A value in more than 16 bits, from the float32 copy that an optimizer had of it."""
    if part.outline is None or value.dtype not in SHORT:
        return value
    masters = optimizer_state.masters_in(_OPTIMIZER, part.outline)
    for other in part.contents.names_of(entry):
        master = masters.get(other.removeprefix(model_state.PREFIX))
        if master is not None:
            wide = value.to(dtype)
            model_state.widen(wide.permute(master.dims), entry, master.entry, part.contents)
            return wide
    return value


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))
    return not isinstance(a, Tensor) and not isinstance(b, Tensor) and bool(a == b)


def _bits(tensor: Tensor) -> Tensor:
    """By which a value that is no number equals itself."""
    return tensor.contiguous().view(-1).view(torch.uint8)


# -- the optimizer


def _groups_for(
    parts: Sequence[_Outlined], model: nn.Module, optimizer: Optimizer
) -> tuple[list[dict[str, Tensor]], dict[str, _Origin], list[dict[str, Any]]]:
    """The optimizer's parameters by group and name, where their state is, and their new groups.

    A frozen parameter may be in no part's optimizer, and has no state then.
    """
    optimizer_state.require_optimizer(optimizer)
    names = model_state.names_in([Part("model", None, model)], 0)
    named = optimizer_state.named_in(optimizer, names, 0)
    aliases = _aliases_in(model)
    known = _origins(parts, optimizer)
    found: dict[str, _Origin] = {}
    groups = []
    for position, group in enumerate(named):
        for name, parameter in group.items():
            having = next((known[n] for n in aliases.get(name, [name]) if n in known), None)
            if having is None and not parameter.requires_grad:
                continue
            found[name] = _origin(name, parameter, _required_state(name, having, parts))
        own = {k: v for k, v in optimizer.param_groups[position].items() if k != "params"}
        origins = {name: found[name] for name in group if name in found}
        options = {**(_common_options(origins) or own), "params": list(group)}
        if isinstance(optimizer, ShardedOptimizer):
            require_plain_options(options)
        groups.append(options)
    return named, found, groups


def _aliases_in(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by each of them: tied weights have several."""
    module = model_state.inner(model)
    every = dict(module.named_parameters(remove_duplicate=False))
    by_id: dict[int, list[str]] = {}
    for name, plain in plain_names(module, every).items():
        by_id.setdefault(id(every[name]), []).append(plain)
    return {name: names for names in by_id.values() for name in names}


def _origins(parts: Sequence[_Outlined], optimizer: Optimizer) -> dict[str, list[_Origin]]:
    """Where the optimizer's state is, by all names that a parameter has in a checkpoint."""
    kind = optimizer_state.type_of(optimizer)
    origins: dict[str, list[_Origin]] = {}
    for part in parts:
        folder, outline = part.contents.folder, part.outline
        if outline is None:
            if part.contents.parts.get(_OPTIMIZER):
                raise InvalidUsage(
                    f"{folder} has no optimizer: {what_it_has(part.contents, _OPTIMIZER)}"
                )
            continue
        if outline["class"] != kind:
            raise InvalidUsage(f"{folder} is of {outline['class']}, and the optimizer is {kind}")
        for group in outline["groups"]:
            for name in group["params"]:
                origin = _Origin(optimizer_loading.Source(part.contents, outline, name), group)
                for each in part.contents.names_of(f"{model_state.PREFIX}{name}"):
                    origins.setdefault(each.removeprefix(model_state.PREFIX), []).append(origin)
    return origins


def _required_state(
    name: str, having: list[_Origin] | None, parts: Sequence[_Outlined]
) -> list[_Origin]:
    if having is None:
        without = [str(part.contents.folder) for part in parts if part.outline is None]
        raise InvalidUsage(
            f"none of {_folders(parts)} has the optimizer's state of {name}"
            + (f"; {', '.join(without)} was saved without an optimizer" if without else "")
            + ": freeze the parameter, leave it out of the optimizer, or load without optimizer="
        )
    return having


def _origin(name: str, parameter: Tensor, having: list[_Origin]) -> _Origin:
    """The only one, which fits."""
    first, *others = having
    source = first.source
    for other in others:
        raise InvalidUsage(
            f"{source.contents.folder} and {other.source.contents.folder} both have the "
            f"optimizer's state of {name}: pass each part once, and let parts have the names of "
            "the whole model, such as 2.weight and not 0.weight"
        )
    shape = tuple(source.entry["shape"])
    if shape != tuple(parameter.shape):
        raise InvalidUsage(
            f"the state of {name} in {source.contents.folder} is of {shape}, and the parameter is "
            f"{tuple(parameter.shape)}"
        )
    require_divisible(name, source.entry["numbers"], math.prod(shape), source.outline["class"])
    return first


def _whole(origin: _Origin | None) -> dict[str, Any]:
    """The state of a parameter as torch's unsharded class has it."""
    if origin is None:
        return {}
    source = origin.source
    return optimizer_loading.state_of_parameter(
        _OPTIMIZER, source.name, source.outline, origin.group["params"], source.contents
    )


def _common_options(origins: Mapping[str, _Origin]) -> dict[str, Any]:
    """The options that the groups of all these parameters had."""
    if not origins:
        return {}
    (name, first), *others = origins.items()
    for other, origin in others:
        for key in first.options.keys() | origin.options.keys():
            if first.options.get(key) != origin.options.get(key):
                raise InvalidUsage(
                    f"one group of the optimizer has {name} and {other}, whose groups were saved "
                    f"with {key}={first.options.get(key)!r} and {origin.options.get(key)!r}: put "
                    "them into groups of their own"
                )
    return first.options


# -- names


def _require_shared(name: str, entry: str, parts: Sequence[_Outlined]) -> None:
    """Raises InvalidUsage where each rank that saved a part had this alone."""
    for part in parts:
        if any(owner_in(n) is not None for n in part.contents.of_all_ranks(f"{entry}@rank")):
            raise InvalidUsage(
                f"each rank that saved {part.contents.folder} had {name} alone, so it fits into no "
                "other part: use pydist.load, on as many ranks as have saved it"
            )


def _folders(parts: Iterable[_Outlined]) -> str:
    return ", ".join(str(part.contents.folder) for part in parts)


def _required(name: str, found: _T | None, parts: Sequence[_Outlined]) -> _T:
    if found is None:
        raise InvalidUsage(
            f"none of {_folders(parts)} has {name}: pass the checkpoints of all parts, saved with "
            "names of the whole model"
        )
    return found
