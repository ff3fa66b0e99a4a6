"""From checkpoints of a model's parts into parts that are cut otherwise."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import pydist.checkpoint.model_state as model_state
import pydist.checkpoint.optimizer_loading as optimizer_loading
import pydist.checkpoint.optimizer_state as optimizer_state
from pydist.checkpoint.manifest import saved_after
from pydist.checkpoint.own_names import owner_in
from pydist.checkpoint.plain_torch import from_torch, opened
from pydist.checkpoint.several_by_name import Part, require_entry
from pydist.errors import InvalidUsage
from pydist.parallel.names.state_names import plain_names

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from pydist.checkpoint.dcp_files import Contents

_OPTIMIZER = "optimizer"

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Origin:
    """The group of an optimizer, in one of the checkpoints, that has a parameter."""

    contents: Contents
    outline: optimizer_state.Outline
    group: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        return {key: value for key, value in self.group.items() if key != "params"}


def from_parts(
    paths: Sequence[str | os.PathLike[str]],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
) -> None:
    """Loads a part of a model from checkpoints of its parts, which may have been cut otherwise.

    Of a pipeline's stages, say, each saved by `pydist.save(path, model=part, optimizer=optimizer)`:
    four of them into two, or into the whole model. Every rank calls it, for its own part; talks to
    nobody. A rank has all of its part's state for a moment, also where its optimizer is sharded.

    Args:
        paths: Of all parts, as for `pydist.load`.
        model: The part, wrapped or not. Parts have the names of the whole model, when they are
            saved and here: `nn.Sequential(OrderedDict(list(whole.named_children())[2:4]))`.
        optimizer: Over parameters of `model`; sharded or not, of the class that was saved. The
            options of its groups become those that the parameters' groups had.

    Raises:
        CheckpointError: There is none at a path, or a file is damaged.
        InvalidUsage: No part has a parameter, or two have it; the parts were saved after different
            steps; the optimizer is of another class, or one group has parameters whose groups had
            different options. Nothing has changed.

    Example:
        >>> paths = [folder / f"stage{i}" for i in range(4)]  # doctest: +SKIP
        >>> from_parts(paths, model=model, optimizer=optimizer)  # doctest: +SKIP
    """
    parts = [opened(path) for path in paths]
    _require_one_step(parts)
    state: dict[str, Any] = {"model": _model_in(parts, model)}
    if optimizer is not None:
        state[_OPTIMIZER] = _optimizer_in(parts, model, optimizer)
    from_torch(state, model=model, optimizer=optimizer)


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


def _model_in(parts: Sequence[Contents], model: nn.Module) -> dict[str, Any]:
    """A module's state under its plain names, from whichever parts have it."""
    module = model_state.inner(model)
    having: dict[str, Contents] = {}
    for part in parts:
        for name in sorted(part.of_all_ranks(model_state.PREFIX)):
            _require_single(name.removeprefix(model_state.PREFIX), having.get(name), part)
            having[name] = part
    state = {}
    for plain in plain_names(module, module.state_dict()).values():
        entry = f"{model_state.PREFIX}{plain}"
        part = _required(plain, having.get(entry), parts)
        tensor = part.tensor(entry)
        if tensor is None:
            state[plain] = part.read_objects([entry])[entry]
            continue
        value = torch.empty(tensor.size, dtype=tensor.properties.dtype)
        part.read_tensors([(entry, (0,) * value.dim(), value)])
        state[plain] = value
    return state


def _optimizer_in(
    parts: Sequence[Contents], model: nn.Module, optimizer: Optimizer
) -> dict[str, Any]:
    """An optimizer's state as torch's unsharded class has it, over the groups that it has here."""
    optimizer_state.require_optimizer(optimizer)
    kind = optimizer_state.type_of(optimizer)
    origins: dict[str, _Origin] = {}
    for part in parts:
        require_entry(part, Part(_OPTIMIZER, None, optimizer))
        outline = part.read_objects([_OPTIMIZER])[_OPTIMIZER]
        if outline["class"] != kind:
            raise InvalidUsage(
                f"{part.folder} is of {outline['class']}, and the optimizer is {kind}"
            )
        for group in outline["groups"]:
            for name in group["params"]:
                known = origins.get(name)
                _require_single(name, None if known is None else known.contents, part)
                origins[name] = _Origin(part, outline, group)
    names = model_state.names_in([Part("model", None, model)], 0)
    state: dict[int, dict[str, Any]] = {}
    groups = []
    number = 0
    for position, named in enumerate(optimizer_state.named_in(optimizer, names, 0)):
        numbers = list(range(number, number + len(named)))
        number += len(numbers)
        found = [_required(name, origins.get(name), parts) for name in named]
        for index, name, origin in zip(numbers, named, found, strict=True):
            values = optimizer_loading.state_of_parameter(
                _OPTIMIZER, name, origin.outline, origin.group["params"], origin.contents
            )
            if values:
                state[index] = values
        own = {k: v for k, v in optimizer.param_groups[position].items() if k != "params"}
        groups.append({**(_common_options(list(named), found) or own), "params": numbers})
    return {"state": state, "param_groups": groups}


def _common_options(names: list[str], origins: list[_Origin]) -> dict[str, Any]:
    """The options that the groups of all these parameters had."""
    if not origins:
        return {}
    first = origins[0].options
    for name, origin in zip(names, origins, strict=True):
        for key in first.keys() | origin.options.keys():
            if first.get(key) != origin.options.get(key):
                raise InvalidUsage(
                    f"one group of the optimizer has {names[0]} and {name}, whose groups were "
                    f"saved with {key}={first.get(key)!r} and {origin.options.get(key)!r}: put "
                    "them into groups of their own"
                )
    return first


def _require_single(name: str, known: Contents | None, part: Contents) -> None:
    if owner_in(name) is not None:
        raise InvalidUsage(
            f"{part.folder} has {name}, which each rank had alone, so it fits into no other part: "
            "use pydist.load, on as many ranks as have saved it"
        )
    if known is not None:
        raise InvalidUsage(
            f"{known.folder} and {part.folder} both have {name}: pass each part once, and let "
            "parts have the names of the whole model, such as 2.weight and not 0.weight"
        )


def _required(name: str, found: _T | None, parts: Sequence[Contents]) -> _T:
    if found is None:
        folders = ", ".join(str(part.folder) for part in parts)
        raise InvalidUsage(
            f"none of {folders} has {name}: pass the checkpoints of all parts, saved with names of "
            "the whole model"
        )
    return found
