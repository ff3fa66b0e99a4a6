"""The names in a state that wrappers of torch's or ours have saved."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pydist._torch import COMPILED, metadata_of, set_metadata, uncompiled

# What torch's DistributedDataParallel puts before every name.
PREFIX = "module."


def plain_name(name: str) -> str:
    """A name without what `torch.compile` has put into it."""
    return ".".join(part for part in name.split(".") if part != COMPILED)


def plain_names(module: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Names in a module's state, as if torch had wrapped nothing within it; by the module's own."""
    wrapped = {
        f"{at}.module".removeprefix(".")
        for at, part in module.named_modules(remove_duplicate=False)
        if isinstance(part, DistributedDataParallel)
    }
    return {name: plain_name(_without(name, wrapped)) for name in names}


def distinct_names(known: Sequence[str | None], own: Sequence[str]) -> list[str]:
    """A name for each parameter of an optimizer, none of them twice.

    Args:
        known: What the model calls them; None for those that it does not have.
        own: What to call those: where that is taken, with their number, as in `weight (7)`.
    """
    taken = {name for name in known if name is not None}
    names = []
    for number, (given, name) in enumerate(zip(known, own, strict=True)):
        if given is not None:
            names.append(given)
            continue
        while name in taken:
            name = f"{name} ({number})"
        taken.add(name)
        names.append(name)
    return names


def _without(name: str, wrapped: Collection[str]) -> str:
    parts = name.split(".")
    return ".".join(
        part for number, part in enumerate(parts) if ".".join(parts[: number + 1]) not in wrapped
    )


def matched(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """A state under the names that a module has, whatever had wrapped or compiled either."""
    own = module.state_dict()
    if own.keys() == state_dict.keys():
        return state_dict
    given = _without_prefix(_uncompiled(state_dict), uncompiled(module))
    names = {plain: name for name, plain in plain_names(module, own).items()}
    found = OrderedDict((names.get(name, name), value) for name, value in given.items())
    metadata = metadata_of(given)
    if metadata is not None:
        places = plain_names(module, (at for at, _ in module.named_modules()))
        notes = {at: metadata[plain] for at, plain in places.items() if plain in metadata}
        set_metadata(found, OrderedDict(notes))
    return found


def _uncompiled(state_dict: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state without what `torch.compile` has put into its names."""
    plain = OrderedDict((plain_name(name), value) for name, value in state_dict.items())
    metadata = metadata_of(state_dict)
    if metadata is not None:
        notes = {plain_name(name): value for name, value in metadata.items()}
        set_metadata(plain, OrderedDict(notes))
    return plain


def take_prefix_off(state_dict: dict[str, Any], place: str, module: nn.Module) -> None:
    """Takes torch's prefix off what is to be loaded into a wrapped module, in place.

    Args:
        state_dict: Of a module above.
        place: Where the wrapper is in it: "net.".
        module: The one that is wrapped.
    """
    given = {n[len(place) :]: value for n, value in state_dict.items() if n.startswith(place)}
    plain = _without_prefix(given, module)
    if plain is not given:
        for name in given:
            del state_dict[place + name]
        state_dict.update({place + name: value for name, value in plain.items()})


def _without_prefix(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """Takes `module.` off the names that have it, unless it is the module that has them."""
    if not any(name.startswith(PREFIX) for name in state_dict):
        return state_dict
    own = module.state_dict()
    if any(name.startswith(PREFIX) for name in own):
        stripped = all(name.removeprefix(PREFIX) in own for name in state_dict)
        if not stripped or not all(name.startswith(PREFIX) for name in state_dict):
            return state_dict
    plain = OrderedDict((name.removeprefix(PREFIX), value) for name, value in state_dict.items())
    if len(plain) < len(state_dict):
        both = next(name for name in state_dict if PREFIX + name in state_dict)
        warnings.warn(
            f"the state to load has both {both} and {PREFIX + both}, as where a checkpoint of "
            "torch's DistributedDataParallel was put into a state of pydist.DataParallel: what is "
            f"loaded is {both}. Cut the prefix off before (key.removeprefix('{PREFIX}')), or load "
            "the checkpoint as it is",
            UserWarning,
            stacklevel=4,
        )
        return state_dict
    metadata = metadata_of(state_dict)
    if metadata is not None:
        # The wrapper's own note, under no name, makes room for that of the module.
        notes = {
            "" if name == "module" else name.removeprefix(PREFIX): value
            for name, value in metadata.items()
        }
        set_metadata(plain, OrderedDict(notes))
    return plain
