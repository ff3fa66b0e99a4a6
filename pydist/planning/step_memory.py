"""What an optimizer keeps, and what its step takes meanwhile: found by steps on a few elements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from pydist._torch import TorchDispatchMode, tree_leaves
from pydist.errors import InvalidUsage
from pydist.sharding.step.eligibility import apart

# Such tensors have no other reason to have as many elements, and all that is for a tensor, not for
# an element, has fewer bytes.
_PROBED = 1009

# Some do more after some steps: RAdam from the sixth on.
_WARM = 8


@dataclass(frozen=True)
class StepMemory:
    """Bytes that an optimizer takes for tensors of one dtype.

    Attributes:
        per_element: That it keeps.
        per_tensor: That it keeps beside those.
        together: During a step, for each element of all tensors: what `foreach=True` makes.
        alone: For each element of the one tensor that is updated at a time.
        lingering: For each element of the tensor before that one.
    """

    per_element: int
    per_tensor: int
    together: int
    alone: int
    lingering: int


def temporaries(tensors: Iterable[tuple[StepMemory, int]]) -> int:
    """The most bytes that one step has at a time beyond what the optimizer keeps.

    Args:
        tensors: That it updates, in its order: each with its number of elements.
    """
    known = [(memory, count) for memory, count in tensors if count]
    together = sum(memory.together * count for memory, count in known)
    alone = [(memory.alone * count, memory.lingering * count) for memory, count in known]
    one_by_one = (now + before for (_, before), (now, _) in pairwise([(0, 0), *alone]))
    return together + max(one_by_one, default=0)


def step_memory(
    optimizer: type[Optimizer], dtype: torch.dtype, options: Mapping[str, Any]
) -> StepMemory:
    """Lets an optimizer step on small tensors on the CPU.

    Args:
        optimizer: The class.
        dtype: Of what it updates.
        options: Of the class.

    Raises:
        InvalidUsage: It can't step.
    """
    key = (optimizer, dtype, repr(sorted(options.items())))
    if key not in _known:
        try:
            with apart():
                _known[key] = _probed(optimizer, dtype, options)
        except (TypeError, ValueError, RuntimeError, AssertionError) as error:
            raise InvalidUsage(
                f"plan: {optimizer.__name__} can't update a flat tensor of {dtype}: {error}"
            ) from error
    return _known[key]


_known: dict[tuple[object, ...], StepMemory] = {}


def _probed(
    optimizer: type[Optimizer], dtype: torch.dtype, options: Mapping[str, Any]
) -> StepMemory:
    kept: Sequence[Tensor] = ()
    # For each element of one tensor: of one, of two and of three.
    peaks = []
    for tensors in (1, 2, 3):
        parameters = [nn.Parameter(torch.zeros(_PROBED, dtype=dtype)) for _ in range(tensors)]
        probe = optimizer(parameters, **options)
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        probe.step()  # which makes the state
        kept = [v for v in probe.state[parameters[0]].values() if isinstance(v, Tensor)]
        with _NewMemory() as new:
            for _ in range(_WARM):
                probe.step()
        peaks.append(new.peak // _PROBED)
    one, two, three = peaks
    together = three - two
    return StepMemory(
        per_element=sum(v.itemsize for v in kept if v.numel() == _PROBED),
        per_tensor=sum(v.nbytes for v in kept if v.numel() != _PROBED),
        together=together,
        alone=one - together,
        lingering=two - one - together,
    )


class _NewMemory(TorchDispatchMode):
    """Counts the bytes of what operations make, while it is alive.

    What an operation has within itself alone is not seen.

    Attributes:
        peak: The most at a time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._before: set[StorageWeakRef] = set()
        self._made: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self._before |= _storages((args, kwargs)).keys() - self._made.keys()
        result = func(*args, **(kwargs or {}))
        found = _storages(result)
        self._made |= {ref: size for ref, size in found.items() if ref not in self._before}
        self._made = {ref: size for ref, size in self._made.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self._made.values()))
        return result


def _storages(tree: Any) -> dict[StorageWeakRef, int]:
    """The memory of tensors in a structure, with its bytes."""
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {StorageWeakRef(storage): storage.nbytes() for storage in storages}
