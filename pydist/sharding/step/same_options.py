"""Whether all ranks step with the same options: each updates a part of every parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pydist import _native
from pydist.parallel.checks.replica_check import check_same
from pydist.sharding.parameter_groups import options_of


def require_same_options(
    communicator: _native.Communicator, param_groups: Iterable[dict[str, Any]]
) -> None:
    """Raises Mismatch where ranks would update their shards in different ways."""
    facts = facts_of_options(param_groups)
    _require_same(communicator, "an option of pydist.ShardedOptimizer's groups", facts)


def require_same_values(
    communicator: _native.Communicator, values: Iterable[list[Any]], options: Iterable[str]
) -> None:
    """The same for what `values_of_step` gives."""
    facts = _facts_of_values(values, options)
    _require_same(communicator, "an option of pydist.ShardedOptimizer's step", facts)


def _require_same(communicator: _native.Communicator, what: str, facts: list[str]) -> None:
    check_same(
        communicator,
        what,
        facts,
        "each rank updates a part of every parameter, so schedule by what all ranks have, such "
        "as pydist.metrics.mean(loss)",
    )


def facts_of_options(param_groups: Iterable[dict[str, Any]]) -> list[str]:
    """What must be the same on all ranks: options that are numbers, or say what they are."""
    return [
        f"{key}={said} in group {number}"
        for number, group in enumerate(param_groups)
        for key, value in options_of(group).items()
        if (said := _said(value)) is not None
    ]


def values_of_step(
    param_groups: Iterable[dict[str, Any]], options: Iterable[str]
) -> list[list[Any]]:
    """What a step uses of groups, as far as no device has to be asked: plain, or in text.

    Args:
        param_groups: The groups.
        options: The keys.
    """
    return [
        [value if type(value := group.get(key)) in _PLAIN else _on_host(value) for key in options]
        for group in param_groups
    ]


def _facts_of_values(values: Iterable[list[Any]], options: Iterable[str]) -> list[str]:
    """What `values_of_step` gives, as text for people."""
    return [
        f"{key}={value if isinstance(value, str) else repr(value)} in group {number}"
        for number, own in enumerate(values)
        for key, value in zip(options, own, strict=True)
    ]


def digest_of(values: list[list[Any]]) -> int:
    """64 bits of what `values_of_step` gives: equal on ranks where that is equal."""
    return int.from_bytes(hashlib.sha256(repr(values).encode()).digest()[:8], "big")


_PLAIN = (bool, int, float, type(None))


def _on_host(value: Any) -> str | None:
    return None if isinstance(value, Tensor) and not value.is_cpu else _said(value)


def _said(value: Any) -> str | None:
    """A value in full, whatever device it is on; None for what has no text of its own."""
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()!r}, {value.dtype})"
    if isinstance(value, (tuple, list)):
        items = [_said(item) for item in value]
        if any(item is None for item in items):
            return None
        # A checkpoint may have made a list of a tuple.
        return f"({', '.join(map(str, items))})"
    if isinstance(value, (bool, int, float, complex, str, type(None))):
        return repr(value)
    return None
