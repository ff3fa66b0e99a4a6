"""In which order an epoch visits the samples: shuffled, as they come, or one of your own.

An order is a pure function of a seed, an epoch and a position. It knows nothing of ranks, batches
and resumption: those share out positions, so an order of one's own has all of that without doing
anything for it.

    class ShardByShard:                 # files in shuffled order, each from its start to its end
        name = "shard by shard"

        def __init__(self, shards: int, samples_a_shard: int) -> None:
            self.shards = pydist.Shuffled(shards)
            self.samples_a_shard = samples_a_shard

        def __len__(self) -> int:
            return len(self.shards) * self.samples_a_shard

        def indices(self, positions: range, *, seed: int, epoch: int) -> torch.Tensor:
            place = torch.arange(positions.start, positions.stop, positions.step)
            shards = self.shards.indices(range(len(self.shards)), seed=seed, epoch=epoch)
            return shards[place // self.samples_a_shard] * self.samples_a_shard + (
                place % self.samples_a_shard
            )

    sampler = pydist.DistributedSampler(dataset, order=ShardByShard(len(files), 10_000))
"""

import zlib
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.job.arguments import a_type

# What fits into an index.
_MOST_SAMPLES = 2**63 - 1
_SEEDS = 2**64


@runtime_checkable
class Order(Protocol):
    """Which sample stands at which position of an epoch; see the module's text.

    Attributes:
        name: Kept in states, in brief: one of an order of another name is refused.
    """

    @property
    def name(self) -> str: ...

    def __len__(self) -> int:
        """The number of positions of an epoch, 1 or more, the same in every epoch."""
        ...

    def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
        """What stands at some positions.

        Args:
            positions: non-empty, each at least 0 and less than `len(self)`, step 1 or more. A call
                asks for some thousands at most.
            seed: the sampler's, any whole number.
            epoch: from 0.

        Returns:
            Indices of samples, int64, one for each position. The same for the same arguments, on
            every rank and in every run.
        """
        ...


class Sequential:
    """Samples as they come, in every epoch.

    Args:
        length: the number of samples.

    Example:
        >>> import pydist
        >>> pydist.Sequential(10).indices(range(1, 10, 4), seed=0, epoch=0)
        tensor([1, 5, 9])
    """

    name = "sequential"

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
        """What stands at some positions: the positions."""
        return torch.arange(positions.start, positions.stop, positions.step)


class Shuffled:
    """A shuffle that takes no memory and no time to begin: each place is computed by itself.

    Up to 4096 samples all orders are equally likely; beyond, a keyed permutation stands for a
    random one (`csrc/sampling/keyed_permutation.h`). Seeds and epochs have nothing to do with one
    another: epoch 1 of seed 0 is not epoch 0 of seed 1.

    Args:
        length: the number of samples, from 1 to 2^63 - 1.

    Example:
        >>> import pydist
        >>> order = pydist.Shuffled(10**12)
        >>> sorted(pydist.Shuffled(5).indices(range(5), seed=0, epoch=0).tolist())
        [0, 1, 2, 3, 4]
    """

    name = "shuffled"

    def __init__(self, length: int) -> None:
        self._length = length
        self._key: tuple[int, int] | None = None
        self._permutation: _native.KeyedPermutation | None = None

    def __len__(self) -> int:
        return self._length

    def indices(self, positions: range, *, seed: int, epoch: int) -> Tensor:
        """What stands at some positions."""
        key = (seed % _SEEDS, epoch % _SEEDS)
        if self._permutation is None or key != self._key:
            self._key, self._permutation = key, _native.KeyedPermutation(self._length, *key)
        return self._permutation.fill(positions.start, positions.step, len(positions))

    def __getstate__(self) -> dict[str, int]:
        return {"_length": self._length}

    def __setstate__(self, state: dict[str, int]) -> None:
        self.__init__(state["_length"])  # type: ignore[misc]


def sample_count(dataset: object) -> int:
    """The number of samples of a data set.

    Raises:
        InvalidUsage: it has no length, or is empty.
    """
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError) as error:
        raise InvalidUsage(
            f"{a_type(dataset)} has no length, so its samples can't be shared out by "
            "index: give a data set with __len__ and __getitem__. An iterable one has to take its "
            "share by itself, from pydist.rank() and pydist.world_size()."
        ) from error
    except OverflowError as error:
        raise InvalidUsage(
            f"the data set ({a_type(dataset)}) has more samples than an index can tell "
            f"apart, which are {_MOST_SAMPLES}."
        ) from error
    if length == 0:
        raise InvalidUsage(
            f"the data set ({a_type(dataset)}) is empty: there is nothing to sample."
        )
    assert length <= _MOST_SAMPLES
    return length


def name_digest(order: Order) -> int:
    """32 bits that tell the name of an order from others, the same in every run."""
    return zlib.crc32(order.name.encode())
