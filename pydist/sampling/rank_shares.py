"""Which positions of an epoch belong to which rank: arithmetic alone.

An epoch is a row of positions, 0 to length - 1. It is consumed in *steps*: `step` positions, over
all ranks, for every one but the last, which may be ragged. Within a step the ranks take turns, so
that the positions of a step are the same however many ranks share it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from pydist.errors import InvalidUsage

Pad = Literal["repeat", "none", "drop"]
PADS: tuple[Pad, ...] = get_args(Pad)


def pad_of(pad: Pad | None, drop_last: bool) -> Pad:
    """What two arguments say together; InvalidUsage where one is not valid or they contradict."""
    if pad is None:
        return "drop" if drop_last else "repeat"
    if pad not in PADS:
        raise InvalidUsage(f"pad='{pad}' is not valid; use one of: {', '.join(PADS)}.")
    if drop_last and pad != "drop":
        raise InvalidUsage(f"drop_last=True and pad='{pad}' contradict each other: give one.")
    return pad


def _part(positions: int, rank: int, ranks: int) -> int:
    """How many of a step's positions a rank gets."""
    return max(0, (positions - rank + ranks - 1) // ranks)


@dataclass(frozen=True)
class Share:
    """One rank's part of an epoch, or of what is left of it.

    Attributes:
        length: Positions of the whole epoch, 1 or more.
        start: The first that is still to be consumed.
        ranks: How many share it.
        rank: Whose part this is.
        step: Positions that all ranks consume in a step, at least one each.
        pad: What becomes of a ragged last step: "repeat" fills it up with positions from the
            front of the epoch until each rank has as many, "drop" leaves out what is too much,
            "none" lets some ranks have one more than others.
        drops_last_step: Whether a ragged last step is left out whole.
    """

    length: int
    start: int
    ranks: int
    rank: int
    step: int
    pad: Pad
    drops_last_step: bool = False

    @cached_property
    def _last_start(self) -> int:
        """Where the ragged last step begins; `end` where there is none."""
        left = max(0, self.length - self.start)
        return self.start + left // self.step * self.step

    @cached_property
    def end(self) -> int:
        """One past the last position; beyond `length` where positions are repeated."""
        ragged = max(0, self.length - self.start) % self.step
        if self.drops_last_step:
            ragged = 0
        elif self.pad == "repeat":
            ragged = min(-(-ragged // self.ranks) * self.ranks, self.step)
        elif self.pad == "drop":
            ragged = ragged // self.ranks * self.ranks
        return self._last_start + ragged

    @cached_property
    def steps(self) -> int:
        """In how many steps this rank has samples."""
        whole, ragged = divmod(self.end - self.start, self.step)
        return whole + (ragged > self.rank)

    @cached_property
    def samples(self) -> int:
        """How many samples this rank has."""
        whole, ragged = divmod(self.end - self.start, self.step)
        return whole * _part(self.step, self.rank, self.ranks) + _part(
            ragged, self.rank, self.ranks
        )

    @property
    def is_even(self) -> bool:
        """Whether the positions of this rank go on evenly from one step to the next."""
        return self.step % self.ranks == 0

    def samples_before(self, step: int) -> int:
        """How many samples this rank has in the steps before one of its own, or in all of them."""
        whole = (self.end - self.start) // self.step
        if step > whole:
            return self.samples
        return step * _part(self.step, self.rank, self.ranks)

    def steps_of(self, samples: int) -> int | None:
        """In how many steps this rank has so many samples; None where that is within a step."""
        if not 0 <= samples <= self.samples:
            return None
        if samples == self.samples:
            return self.steps
        steps, within = divmod(samples, self.samples_before(1))
        return None if within else steps

    def position_after(self, steps: int) -> int:
        """Where all ranks go on after so many steps; `length` where nothing is left."""
        position = self.start + steps * self.step
        return self.length if position >= self.end else position

    def positions(self, first: int, stop: int) -> Iterator[range]:
        """This rank's positions in the steps from `first` to before `stop`, in order.

        More than one step at a time only where the share `is_even`. Each range is non-empty and
        within the epoch: a repeated position stands as that of the front that it repeats.
        """
        begin = self.start + first * self.step + self.rank
        end = min(self.start + stop * self.step, self.end)
        within = range(begin, min(end, self.length), self.ranks)
        if within:
            yield within
        for position in range(begin + len(within) * self.ranks, end, self.ranks):
            repeated = position % self.length
            yield range(repeated, repeated + 1)
