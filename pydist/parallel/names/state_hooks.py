"""Runs the state_dict hooks that were registered on a wrapper, around those of its module.

torch runs them because its `state_dict()` goes from the wrapper down to the module. Ours asks the
module alone, whose names have no prefix.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from pydist._torch import (
    is_public_hook,
    load_state_dict_post_hooks,
    load_state_dict_pre_hooks,
    metadata_of,
    set_metadata,
    state_dict_post_hooks,
    state_dict_pre_hooks,
)


def taken_with_hooks(wrapper: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The module's `state_dict()` with the given arguments, as the wrapper's hooks make it."""
    # Older versions of torch took these arguments by position.
    named = {**dict(zip(("destination", "prefix", "keep_vars"), args, strict=False)), **kwargs}
    prefix: str = named.get("prefix") or ""
    for before in state_dict_pre_hooks(wrapper).values():
        before(wrapper, prefix, bool(named.get("keep_vars")))
    state = module.state_dict(*args, **kwargs)
    for after in state_dict_post_hooks(wrapper).values():
        metadata = (metadata_of(state) or {}).get(prefix[:-1], {})
        changed = after(wrapper, state, prefix, metadata)
        if changed is not None and is_public_hook(after):
            raise RuntimeError("state_dict post-hook must return None")
        state = state if changed is None else changed
    return state


class HookedLoading:
    """One call of a wrapper's `load_state_dict`: what its hooks may change, they change here.

    Args:
        wrapper: It has the hooks.
        module: It loads the state.
        state_dict: As it was given; hooks before loading see a copy.
    """

    def __init__(
        self, wrapper: nn.Module, module: nn.Module, state_dict: Mapping[str, Any]
    ) -> None:
        self._wrapper = wrapper
        self._module = module
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._errors: list[str] = []
        self.state_dict: OrderedDict[str, Any] = OrderedDict(state_dict)
        metadata = metadata_of(state_dict)
        if metadata is not None:
            set_metadata(self.state_dict, metadata)
        own = {} if metadata is None else metadata.get("", {})
        told = (self._missing, self._unexpected, self._errors)
        for hook in load_state_dict_pre_hooks(wrapper).values():
            hook(self.state_dict, "", own, True, *told)

    def load(self, state_dict: Mapping[str, Any], strict: bool) -> Any:
        """Loads a state into the module; hooks behind it see what is missing, and may forgive it.

        Args:
            state_dict: `self.state_dict`, under the module's names.
            strict: Whether missing and unexpected names are an error.
        """
        if self._errors:
            said = "\n\t".join(self._errors)
            name = type(self._wrapper).__name__
            raise RuntimeError(f"Error(s) in loading state_dict for {name}:\n\t{said}")
        # Behind the module's own hooks, and before torch raises for what is missing.
        handle = self._module.register_load_state_dict_post_hook(self._run_last)
        try:
            return self._module.load_state_dict(state_dict, strict)
        finally:
            handle.remove()

    def _run_last(self, _module: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys.extend(self._missing)
        incompatible.unexpected_keys.extend(self._unexpected)
        for hook in load_state_dict_post_hooks(self._wrapper).values():
            if hook is not run_hooks_of_module:
                hook(self._wrapper, incompatible)


def has_loading_hooks(wrapper: nn.Module) -> bool:
    """Whether anybody has registered a hook of loading on a wrapper."""
    behind = load_state_dict_post_hooks(wrapper).values()
    is_users = any(hook is not run_hooks_of_module for hook in behind)
    return is_users or bool(load_state_dict_pre_hooks(wrapper))


def run_hooks_of_module(wrapper: Any, incompatible: Any) -> None:
    """The first hook of each wrapper, for where a module above it loads.

    torch then asks the wrapper for its hooks, and not the module in it.
    """
    module: nn.Module = wrapper.module
    for hook in load_state_dict_post_hooks(module).values():
        hook(module, incompatible)
