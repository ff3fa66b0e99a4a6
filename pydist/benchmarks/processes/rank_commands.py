"""What the ranks of an arm are told to do, and how they do it.

Every rank gets the same command at about the same time, and answers with its own part. Between
commands a rank sleeps: it takes nothing from the arm whose turn it is.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat

from pydist.benchmarks.collective_cases import OUT_OF_PLACE, Case
from pydist.benchmarks.patterns import count_wrong, fill
from pydist.benchmarks.processes.arms import Arm, RooflineArm, Unsupported
from pydist.benchmarks.tuned import Tuned, tuned_here

# In one check.
_CHECKED_CALLS = 3


@dataclass(frozen=True)
class Reserve:
    """Buffers of so many bytes for each arm. The answer: a description of each, by name."""

    size_bytes: int


@dataclass(frozen=True)
class Check:
    """A few calls on predicted values. The answer: how many elements on this rank are wrong."""

    arm: str
    case: Case


@dataclass(frozen=True)
class Time:
    """Calls, all at once or each by itself. The answer: seconds for each call, or their mean.

    The clock costs as much as a small call, so those are also timed in one go.
    """

    arm: str
    case: Case
    calls: int
    each: bool


@dataclass(frozen=True)
class Tell:
    """The answer: what the tuner has chosen on this rank."""


@dataclass(frozen=True)
class Distance:
    """The answer, on rank 0: nanoseconds of a cache line from its core to that of each other rank
    of its host. Empty where nobody can tell."""


@dataclass(frozen=True)
class Stop:
    """The end. No answer."""


@dataclass(frozen=True)
class Failed:
    """Answers a command that raised."""

    message: str
    # Whether the arm just has no such thing: nothing was sent, and it goes on.
    is_unsupported: bool


Command = Reserve | Check | Time | Tell | Distance | Stop
Answer = dict[str, str] | int | list[float] | list[Tuned] | Failed


def obey(command: Reserve | Check | Time | Tell | Distance, arms: dict[str, Arm]) -> Answer:
    """Does what the command says, on this rank. Every rank of the arms calls it."""
    try:
        if isinstance(command, Reserve):
            return _reserve(command.size_bytes, arms)
        if isinstance(command, Tell):
            return tuned_here()
        if isinstance(command, Distance):
            return _distances_ns(arms)
        arm = arms[command.arm]
        call = arm.call(command.case)
        if isinstance(command, Check):
            return _check(arm, command.case, call)
        return _time(arm, call, command.calls, each=command.each)
    except Unsupported as error:
        return Failed(str(error), is_unsupported=True)
    except Exception as error:
        text = " ".join(str(error).split("\n")[0].split())
        return Failed(f"{type(error).__name__}: {text}", is_unsupported=False)


def _reserve(size_bytes: int, arms: dict[str, Arm]) -> dict[str, str]:
    first: dict[str, Arm] = {}  # by memory
    for arm in arms.values():
        if arm.memory in first:
            arm.share_buffers(first[arm.memory])
        else:
            arm.reserve(size_bytes)
            first[arm.memory] = arm
    return {name: arm.description for name, arm in arms.items()}


def _distances_ns(arms: dict[str, Arm]) -> list[float]:
    found = (arm for arm in arms.values() if isinstance(arm, RooflineArm))
    return [ns for arm in found for ns in arm.distances_ns()]


def _check(arm: Arm, case: Case, call: Callable[[], object]) -> int:
    buffers = arm.buffers(case)
    fill(case, arm.rank, buffers)
    arm.barrier()
    # Out of place the result is the same each time: calls on each other's heels, as when timed.
    for _ in range(_CHECKED_CALLS if case.place == OUT_OF_PLACE else 1):
        call()
    # Peers may still read what this rank has sent, or write to it.
    arm.barrier()
    return count_wrong(case, arm.rank, buffers)


def _time(arm: Arm, call: Callable[[], object], calls: int, *, each: bool) -> list[float]:
    # The other arms' turns have left their data in the caches, and this one's threads asleep.
    for _ in repeat(None, 1 + calls // 10):
        call()
    # Twice, so that ranks start together: the first waits for the late, the second for nobody.
    arm.barrier()
    arm.barrier()
    clock = time.perf_counter_ns
    if each:
        if calls > 1:
            call()  # which waits for whoever has left the barrier last
        times = []
        for _ in repeat(None, calls):
            start = clock()
            call()
            times.append((clock() - start) * 1e-9)
    else:
        start = clock()
        for _ in repeat(None, calls):
            call()
        times = [(clock() - start) * 1e-9 / calls]
    arm.barrier()
    return times
