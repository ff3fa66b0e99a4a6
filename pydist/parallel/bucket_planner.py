"""Which gradients travel together, and in which order.

A *bucket* travels in one operation. Buckets are launched in the order of the plan, each as soon as
it is complete and those before it are on their way. So a plan follows the order in which backward
completes gradients: at first the reverse of registration, then the order that was seen.
"""

from __future__ import annotations

import io
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass

from pydist.errors import InvalidUsage

# The size of buckets where nothing was measured. Small enough that most of the traffic is over when
# backward ends, large enough that the cost of starting an operation does not show on any backend.
DEFAULT_CAP_BYTES = 8 << 20
_LEAST_CAP_BYTES = 256 << 10
# What each bucket costs the training thread beside the latency: starting it, and giving way to the
# thread that moves it along where both share a core. Measured with 200 layers of 64x64.
_HANDOVER_S = 50e-6
_MOST_CAP_BYTES = 64 << 20


def cap_bytes_of(bucket_cap_mb: float | None, what: str = "bucket_cap_mb") -> int | None:
    """A user's size of buckets, in bytes; None if there is none.

    Args:
        bucket_cap_mb: In MiB.
        what: The name of the argument, for the error.

    Raises:
        InvalidUsage: It is no number of MiB.
    """
    if bucket_cap_mb is None:
        return None
    is_number = isinstance(bucket_cap_mb, numbers.Real) and not isinstance(bucket_cap_mb, bool)
    if not (is_number and 0 < bucket_cap_mb < math.inf):
        raise InvalidUsage(
            f"{what} is {bucket_cap_mb!r}; it must be a number of MiB greater than zero, "
            "such as 8, or None"
        )
    return int(bucket_cap_mb * 2**20)


@dataclass(frozen=True)
class PlannedParameter:
    """What a plan needs to know of a parameter with a dense gradient.

    Attributes:
        index: Its number, in the order of registration.
        name: Its name in the module.
        size_bytes: Of its gradient.
        block: Only gradients of one block can share a bucket: those of one dtype and device, as
            far as they trained from the beginning; those unfrozen or added together later.
        is_regular: Whether every rank has used it in recent steps. One that some rank does without
            holds up its bucket until the end of backward.
    """

    index: int
    name: str
    size_bytes: int
    block: int
    is_regular: bool


def plan_buckets(
    parameters: Sequence[PlannedParameter], cap_bytes: int | Sequence[int]
) -> list[list[int]]:
    """Cuts parameters into buckets of at least `cap_bytes`, but for the last of each block.

    Args:
        parameters: In the order in which backward is expected to complete them.
        cap_bytes: A bucket is closed once it holds at least this much. Several: for the first
            bucket of each block, the second, and so on; the last of them for all that follow.

    Returns:
        The buckets in the order of launching, each a list of `index`; every parameter once.
        Regular parameters do not share a bucket with others.
    """
    closed: list[tuple[int, list[int]]] = []  # with the position of the last member
    filling: dict[tuple[bool, int], tuple[int, int, list[int]]] = {}
    caps = [cap_bytes] if isinstance(cap_bytes, int) else list(cap_bytes)
    counts: dict[tuple[bool, int], int] = {}  # of closed buckets
    for position, parameter in enumerate(parameters):
        key = (parameter.is_regular, parameter.block)
        _, size_bytes, members = filling.pop(key, (0, 0, []))
        size_bytes += parameter.size_bytes
        members.append(parameter.index)
        count = counts.get(key, 0)
        if size_bytes >= caps[min(count, len(caps) - 1)]:
            closed.append((position, members))
            counts[key] = count + 1
        else:
            filling[key] = (position, size_bytes, members)
    closed += [(position, members) for position, _, members in filling.values()]
    return [members for _, members in sorted(closed)]


def best_cap_bytes(total_bytes: int, latency_s: float, seconds_per_byte: float) -> int:
    """The size of buckets that leaves the least communication for after backward.

    The last bucket, of size s, is on its way when backward is over, and each of the total / s
    buckets costs something once, c: s * seconds_per_byte + total / s * c is least at the square
    root of total * c / seconds_per_byte. Rounded to a power of two, so that noise in the
    measurement rarely changes the plan.

    Args:
        total_bytes: Of all gradients.
        latency_s: What an all-reduce takes, however small.
        seconds_per_byte: What it takes more for each byte; 0 if it was not measured.
    """
    if not (total_bytes > 0 and latency_s > 0 and seconds_per_byte > 0):
        return DEFAULT_CAP_BYTES
    best = math.sqrt(total_bytes * (latency_s + _HANDOVER_S) / seconds_per_byte)
    return int(2 ** round(math.log2(min(max(best, _LEAST_CAP_BYTES), _MOST_CAP_BYTES))))


def typical_cap_bytes(total_bytes: int) -> int:
    """The best size on a link of 10 GB/s and 10 us.

    Of models with shards, whose sums and norms depend on how buckets are cut: the same in every
    run, whatever the link is busy with when it would be measured.

    Args:
        total_bytes: Of all gradients.
    """
    return best_cap_bytes(total_bytes, latency_s=10e-6, seconds_per_byte=1e-10)


@dataclass(frozen=True)
class PlannedBucket:
    """One bucket.

    Attributes:
        size_bytes: With padding between gradients.
        parameters: Names, in the order in which they lie in the bucket.
        ready_s: When it is complete, in seconds since the beginning of backward: the mean of the
            steps since the plan last changed. None before the first.
    """

    size_bytes: int
    parameters: tuple[str, ...]
    ready_s: float | None


@dataclass(frozen=True, repr=False)
class BucketPlan:
    """The buckets of a model, in the order of launching. Prints as a table."""

    buckets: tuple[PlannedBucket, ...]

    def __repr__(self) -> str:
        # Only who prints a plan needs it.
        from rich.console import Console
        from rich.table import Table

        table = Table()
        for column in ("bucket", "bytes", "parameters", "ready after"):
            table.add_column(column, justify="left" if column == "parameters" else "right")
        for number, bucket in enumerate(self.buckets):
            names = bucket.parameters
            shown = names[0] if len(names) == 1 else f"{names[0]} ... {names[-1]} ({len(names)})"
            ready = "not seen yet" if bucket.ready_s is None else f"{bucket.ready_s * 1e3:.2f} ms"
            table.add_row(str(number), f"{bucket.size_bytes:,}", shown, ready)
        console = Console(file=io.StringIO(), width=100)
        console.print(table)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined, no-any-return]
