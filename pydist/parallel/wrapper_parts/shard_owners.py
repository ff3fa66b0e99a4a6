"""What a wrapper and the optimizers that update shards of its model's parameters ask each other."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor, nn

from pydist.errors import InvalidUsage
from pydist.parallel.ownership import ids_in_any
from pydist.parallel.wrapper_parts.wrapper_state import WrapperState


class ShardOwner(Protocol):
    """An optimizer that updates shards of parameters, for what the wrapper asks of it."""

    def before_forward(self, module: nn.Module) -> None:
        """Waits for what the forward of this module would not wait for itself."""

    def during_forward(self) -> contextlib.AbstractContextManager[None]:
        """Hides from the forward what it can't do with."""

    def loading(self) -> contextlib.AbstractContextManager[None]:
        """All ranks write the same into parameters, and nobody reads them. All have met before."""

    def finish(self) -> None:
        """Returns once all parameters have arrived that the last step has updated."""

    def own_writes(self) -> str:
        """What the program has written into parameters that all ranks share, in words; or ""."""


class HasShardOwners(WrapperState):
    """The part of `pydist.DataParallel` that is there for such optimizers."""

    def shard_owners(self) -> list[ShardOwner]:
        """The optimizers that update shards of the model's parameters."""
        # In two parts: the compiler of torch 2.11 takes a reference that is called in a condition
        # for the object that it refers to.
        owners = (reference() for reference in self._owners)
        return [owner for owner in owners if owner is not None]

    def add_owner(self, owner: weakref.ref[Any]) -> int:
        """Makes an optimizer known that updates shards, before it takes any. Returns its number."""
        self._owners.append(owner)
        return len(self._owners)

    def add_shards(self, number: int, shown: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Gives parameters to an optimizer for good, with what stands for their gradients."""
        for parameter, gradient in shown:
            self._sharded_parameters[parameter] = (number, gradient)

    def removed(self) -> list[Tensor]:
        """Parameters that have trained here, and that no wrapped model has any more."""
        own = {id(parameter) for parameter in self.module.parameters()}
        former = [p for _, p, _ in self._trained.known if id(p) not in own]
        elsewhere = ids_in_any() if former else set()
        return [parameter for parameter in former if id(parameter) not in elsewhere]

    def require_unsharded(self, name: str, parameter: Tensor) -> None:
        """Raises InvalidUsage where an optimizer has a parameter, or had it and is gone."""
        if parameter in self._sharded_parameters:
            raise InvalidUsage(
                f"parameter {name} has another pydist.ShardedOptimizer already, or had one that is "
                "gone, and its gradient is reduced into shards of that one: keep that one, or wrap "
                "the module anew"
            )

    def require_shardable(self, name: str, parameter: Tensor) -> None:
        """Raises InvalidUsage where no optimizer can have shards of a parameter."""
        self._reducer.require_shardable()
        if any(p is parameter and is_sparse for _, p, is_sparse in self._trained.known):
            raise sparse_error(name)


def sparse_error(name: str) -> InvalidUsage:
    """What says that no such optimizer takes a parameter with sparse gradients."""
    return InvalidUsage(
        f"the gradient of parameter {name} is sparse, and pydist.ShardedOptimizer takes dense "
        "ones: build the embedding with sparse=False, or give it an optimizer of its own"
    )
