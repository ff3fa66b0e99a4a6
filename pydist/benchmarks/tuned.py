"""What the engine's tuner has chosen, in words, and for the cases of a benchmark."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pydist import _native
from pydist.benchmarks.collective_cases import Case
from pydist.benchmarks.sizes import size_text

# Bytes of a piece, whether stores stream, and whether ranks read each other's memory in place.
Way = tuple[int, bool, bool]

# Bytes of a message that may be sent before its receiver asks for it, see docs/engine.md; fewer in
# a group of very many ranks.
MOST_AHEAD = 512 << 10


@dataclass(frozen=True)
class Tuned:
    """A class of collectives or messages, and what a rank has found; can be sent to others."""

    kind: str
    memory: str
    ranks: int
    bytes: int
    way: Way
    times_us: tuple[tuple[Way, float], ...]
    # Of messages: whether the receiver sends to their sender, too.
    sends_too: bool = False

    @property
    def name(self) -> str:
        """Of the kind, for tables."""
        return f"{self.kind}, both send" if self.sends_too else self.kind


def tuned_here() -> list[Tuned]:
    """What this process knows."""
    return [tuned_of(each) for each in _native.tuning_table()]


def tuned_of(each: _native.TunedClass) -> Tuned:
    """The same of one class."""
    times = tuple(each.times_us)
    return Tuned(each.kind, each.memory, each.ranks, each.bytes, each.way, times, each.sends_too)


def way_text(way: Way, memory: str) -> str:
    """ "one shot", "pieces of 128 KiB", "pieces of 512 KiB, streaming stores"."""
    piece_bytes, streams, in_place = way
    if memory == "symmetric":
        return "streaming stores" if streams else "cached stores"
    if in_place and memory != "shared":
        return "single copies"
    text = f"pieces of {size_text(piece_bytes)}" if piece_bytes else "one shot"
    if in_place:
        text = "in place"
    return f"{text}, streaming stores" if streams else text


def times_text(times_us: Iterable[tuple[Way, float]], memory: str) -> str:
    """The times of candidates, the fastest first."""
    ordered = sorted(times_us, key=lambda each: each[1])
    return "; ".join(f"{way_text(way, memory)}: {us:.4g} us" for way, us in ordered)


def class_bytes(case: Case) -> int:
    """The size class of a case: the power of two that what a rank contributes fits into."""
    contributed = case.sent * case.torch_dtype.itemsize
    return 1 << max(0, contributed - 1).bit_length()


def tuned_for(case: Case, memory: str, of_ranks: Sequence[Sequence[Tuned]]) -> Tuned | None:
    """What the rank that chooses for a case has found; None where it goes as is usual.

    Args:
        case: it.
        memory: where its buffers lie: "ordinary", "symmetric" or "shared".
        of_ranks: what each rank knows, in rank order.
    """
    wanted = (case.collective, memory, case.ranks, class_bytes(case), False)
    if case.collective == "send_recv":
        # Each rank sends to the next one; of two, so do both. To messages symmetric memory is
        # ordinary.
        lies_in = "shared" if memory == "shared" else "ordinary"
        # Ordinary ones that come ahead are chosen for together, whoever sends.
        comes_ahead = lies_in == "ordinary" and class_bytes(case) <= MOST_AHEAD
        both_send = case.ranks == 2 and not comes_ahead
        wanted = ("recv", lies_in, 2, class_bytes(case), both_send)
    chooser = max(case.root, 0)  # rank 0 where the kind has no root
    for each in of_ranks[chooser]:
        if (each.kind, each.memory, each.ranks, each.bytes, each.sends_too) == wanted:
            return each
    return None
