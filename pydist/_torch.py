"""Private names of torch that pydist uses, each with the reason. Tested against torch 2.11 to 2.14.

A new torch may rename any of them; this is where to look then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch._C import _functorch
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

T = TypeVar("T")

Hooks = dict[int, Callable[..., Any]]

# The attribute of a module in which torch's DistributedDataParallel looks for names to ignore:
# programs written for torch set it.
_IGNORED_NAMES = "_ddp_params_and_buffers_to_ignore"


def ignored_names(module: nn.Module) -> frozenset[str]:
    """The names that torch's DistributedDataParallel would ignore in a module."""
    return frozenset(getattr(module, _IGNORED_NAMES, ()))


def set_ignored_names(module: nn.Module, names: Collection[str]) -> None:
    """Does what torch's class does: sets the attribute, and marks the tensors for torch.compile."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def is_marked_as_ignored(tensor: Tensor) -> bool:
    """Whether `set_ignored_names` has named a tensor, where the model is not known."""
    return bool(getattr(tensor, "_ddp_ignored", False))


def state_dict_pre_hooks(module: nn.Module) -> Hooks:
    """Hooks before a module's `state_dict()`: a wrapper that asks its module has to run its own."""
    hooks: Hooks = module._state_dict_pre_hooks
    return hooks


def state_dict_post_hooks(module: nn.Module) -> Hooks:
    """Hooks behind a module's `state_dict()`."""
    hooks: Hooks = module._state_dict_hooks
    return hooks


def is_public_hook(hook: Callable[..., Any]) -> bool:
    """Whether a hook behind `state_dict()` must return nothing; others may replace it."""
    return getattr(hook, "_from_public_api", False)


def load_state_dict_pre_hooks(module: nn.Module) -> Hooks:
    """Hooks before a module loads a state."""
    hooks: Hooks = module._load_state_dict_pre_hooks
    return hooks


def load_state_dict_post_hooks(module: nn.Module) -> Hooks:
    """Hooks behind the loading of a state."""
    hooks: Hooks = module._load_state_dict_post_hooks
    return hooks


def active_torch_wrapper() -> DistributedDataParallel | None:
    """The DistributedDataParallel of torch's whose forward runs in this process, if any does.

    pydist itself puts something else there for torch.compile, which does not count.
    """
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    return active if isinstance(active, DistributedDataParallel) else None


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """The table of a module's buffers: looking there is much faster than asking for attributes."""
    return module._buffers


def version_of(tensor: Tensor | None) -> int:
    """How often a tensor was written in place, as autograd counts; -1 where it does not count."""
    try:
        return -1 if tensor is None else tensor._version
    except RuntimeError:  # made in inference mode
        return -1


def is_of_functorch(tensor: Tensor) -> bool:
    """Whether a transform of `torch.func` stands for a tensor, which then has no values."""
    return _functorch.is_functorch_wrapped_tensor(tensor)


def is_timeout_torchs_own() -> bool:
    """Whether nobody gave the group that torch is making a time-out, so that torch took its own.

    For the function that torch calls to make a group's backend. Where a program gives no time-out,
    torch passes its constant `default_pg_timeout` on (as some frameworks do by themselves); the
    backend gets a copy, which looks like 30 minutes that the program asked for. Only
    `_new_process_group_helper`, the function of torch's that calls the backend's, still holds the
    object itself.
    """
    maker = dist.distributed_c10d._new_process_group_helper.__code__
    frame = sys._getframe()
    while frame is not None and frame.f_code is not maker:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and frame.f_locals.get("timeout") is default_pg_timeout


class Indices(Protocol):
    """What a loader's iterators go through: the indices of a batch, or of a sample, at a time."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Any]: ...


class FedLoader(DataLoader[T]):
    """A loader whose iterators get their indices from elsewhere than the samplers that it shows.

    Subclasses define both methods.
    """

    def feed(self) -> Indices:
        """What iterators ask for indices."""
        raise NotImplementedError

    def starting(self) -> AbstractContextManager[None]:
        """Entered while an iterator is made, with its workers."""
        raise NotImplementedError

    # torch chooses between `sampler` and `batch_sampler` here. Those are public, and libraries put
    # them into other loaders, so they have to stay what anybody can iterate over.
    @property
    def _index_sampler(self) -> Indices:
        return self.feed()

    # torch calls this for each iterator; with persistent workers, once. `__iter__` is no
    # substitute: a loader's own class may ask for torch's iterator at any time.
    def _get_iterator(self) -> Any:
        with self.starting():
            return super()._get_iterator()
