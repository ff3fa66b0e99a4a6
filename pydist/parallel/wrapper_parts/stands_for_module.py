"""What lets a wrapper stand for its module: names, states, attributes, training mode, pickles."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from torch import Tensor, nn

from pydist._torch import StandIn
from pydist.errors import InvalidUsage
from pydist.parallel.names.plain_state import PlainState
from pydist.parallel.names.prefixed_names import warn_of_prefix
from pydist.parallel.names.state_hooks import HookedLoading, has_loading_hooks, taken_with_hooks
from pydist.parallel.names.state_names import matched, take_prefix_off
from pydist.parallel.nested_wrappers import refuse_copying_and_sharding
from pydist.parallel.wrapper_parts.additions import (
    can_be_kept_beside,
    refuse_addition,
    refuse_another_module,
)
from pydist.parallel.wrapper_parts.watched_methods import WatchedMethods

_Wrapper = TypeVar("_Wrapper", bound="StandsForModule")


class StandsForModule(StandIn):
    """The part of `pydist.DataParallel` that makes it the module for all that goes by names."""

    # Attributes that belong to the wrapper, even if the module has some of the same name.
    _own_names: ClassVar[Collection[str]]
    # Methods of the module that are called through the wrapper.
    _watched_methods: WatchedMethods

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("module")
            if module is None:
                raise
            value = getattr(module, name)
            if inspect.ismethod(value) and value.__self__ is module:
                return self._watched_methods.of(value)
            return value

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or hasattr(type(self), name):
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        module = self.__dict__.get("module")
        if name == "module" and module is not None:
            if value is not module:
                refuse_another_module()
            return
        is_own = name in type(self)._own_names or name in self.__dict__ or hasattr(type(self), name)
        if module is None or is_own or not hasattr(module, name):
            if module is not None and isinstance(value, nn.Module):
                if not can_be_kept_beside(value):
                    refuse_addition(module, name, value)
                self.__dict__[name] = value
                return
            super().__setattr__(name, value)
        else:
            _warn_of_setting(module, name)
            setattr(module, name, value)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Puts another module into the place of one that the wrapped module has.

        Raises:
            InvalidUsage: It has none of that name.
        """
        self._require_known(name, module)
        super().add_module(name, module)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As `add_module`, of a parameter."""
        self._require_known(name, param)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """As `add_module`, of a buffer."""
        self._require_known(name, tensor)
        super().register_buffer(name, tensor, persistent)

    def _require_known(self, name: str, value: nn.Module | Tensor | None) -> None:
        module = self.__dict__.get("module")
        if module is not None and value is not None and not hasattr(module, name):
            refuse_addition(module, name, value)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The module's state, under the module's own names."""
        warn_of_prefix("state_dict")
        state = taken_with_hooks(self, self.module, *args, **kwargs)
        is_given = bool(args) or kwargs.get("destination") is not None
        return state if is_given else PlainState.of(state)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state saved with or without torch's wrapper, and with or without `torch.compile`.

        All ranks load the same state: nothing is copied between them.

        Args:
            state_dict: Names and values.
            strict: Whether missing and unexpected names are an error.
            assign: Not supported: the parameters stay the ones that were wrapped.

        Returns:
            The missing and unexpected names, like `torch.nn.Module.load_state_dict`.
        """
        if assign:
            raise InvalidUsage(
                "load_state_dict(assign=True) would replace the parameters that pydist."
                "DataParallel has hooked: load the module first, then wrap it"
            )
        if has_loading_hooks(self):
            hooked = HookedLoading(self, self.module, state_dict)
            return hooked.load(matched(hooked.state_dict, self.module), strict)
        return self.module.load_state_dict(matched(state_dict, self.module), strict)

    def _match_names(self, state_dict: dict[str, Any], prefix: str) -> None:
        take_prefix_off(state_dict, prefix, self.module)

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """The module and those within it, under the module's own names."""
        warn_of_prefix("named_modules")
        named: Iterator[tuple[str, nn.Module]] = self.module.named_modules(*args, **kwargs)
        return named

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """The module's parameters, under the module's own names."""
        warn_of_prefix("named_parameters")
        return super().named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers, under the module's own names."""
        warn_of_prefix("named_buffers")
        return super().named_buffers(*args, **kwargs)

    def children(self) -> Iterator[nn.Module]:
        """The module itself, as in torch's class: what goes on from there reaches all of it.

        By name, `named_children()`, there are the module's own children.

        Raises:
            InvalidUsage: `torch.nn.parallel.replicate` asks, which can't copy a wrapper, or torch's
                `fully_shard`, which would average what the wrapper does.
        """
        refuse_copying_and_sharding()
        yield self.module

    @property
    def training(self) -> bool:
        """Whether the module is in training mode: the wrapper has no mode of its own."""
        return self.module.training

    @training.setter
    def training(self, mode: bool) -> None:
        # torch's constructor sets it before there is a module.
        if "module" in self.__dict__:
            self.module.training = mode

    def train(self: _Wrapper, mode: bool = True) -> _Wrapper:
        """Sets training mode in the module."""
        self.module.train(mode)
        return self

    def apply(self: _Wrapper, fn: Callable[[nn.Module], None]) -> _Wrapper:
        """Applies `fn` to the module and those within it."""
        self.module.apply(fn)
        return self

    def __reduce__(self) -> tuple[Callable[[nn.Module], nn.Module], tuple[nn.Module]]:
        return _unwrapped, (self.module,)


# The attributes set through a wrapper that were warned of, by the module's class and their name.
_warned_of: set[tuple[type, str]] = set()


def _warn_of_setting(module: nn.Module, name: str) -> None:
    """Warns once of an attribute that torch's wrapper would have set in itself."""
    if (type(module), name) in _warned_of:
        return
    _warned_of.add((type(module), name))
    warnings.warn(
        f"setting {name!r} on a pydist.DataParallel sets it in the wrapped module, a "
        f"{type(module).__name__}, which has an attribute of that name; torch's "
        "DistributedDataParallel would set its own "
        f"and leave the module as it is: write model.module.{name} = ... to say which is meant",
        UserWarning,
        stacklevel=3,
    )


def _unwrapped(module: nn.Module) -> nn.Module:
    return module
