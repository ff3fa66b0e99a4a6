"""Which values in an optimizer's state can be cut, as the parameters that they are of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from pydist.errors import InvalidUsage


def is_per_element(value: Any, count: int) -> bool:
    """Whether a value of a range's state has an element for each of the parameter's."""
    return isinstance(value, Tensor) and value.dim() != 0 and value.numel() == count


def is_of_range(value: Any, count: int) -> bool:
    """Whether a value of a range's state is of all its elements together, such as scales of blocks.

    It has neither an element for each of the parameter's, nor is it one for all, so it means
    nothing to any other range.
    """
    return any(tensor.numel() > 1 for tensor in _tensors_in(value)) and not is_per_element(
        value, count
    )


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)


def require_divisible(
    name: str, values: Mapping[str, Any], count: int, kind: str = "the optimizer"
) -> None:
    """Raises InvalidUsage where values of a range can't be cut for other ranges, see `is_of_range`.

    Args:
        name: Of the parameter.
        values: What a StateRange holds.
        count: Elements of the range.
        kind: The optimizer's class.
    """
    for key, value in values.items():
        if is_of_range(value, count):
            what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else "several tensors"
            raise InvalidUsage(
                f"{kind} keeps {key!r} for {count} elements of parameter {name}: {what}, which is "
                "neither a value for each element nor one for all, so it can't be cut for other "
                "shards; use state_dict() and load_state_dict() with as many ranks and the same "
                f"buckets, another class, or {kind} without pydist.ShardedOptimizer"
            )
