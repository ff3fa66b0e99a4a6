"""Private names of torch that pydist uses, each with the reason. Tested against torch 2.11 to 2.14.

A new torch may rename any of them; this is where to look then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch.utils.data import DataLoader

T = TypeVar("T")


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
