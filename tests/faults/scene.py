"""A drill, the scene that its ranks act on, and what each of them reports."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from belongings import belongings, left_since

import pydist

# How long after its end a job's threads and sockets may still be there.
TIDY_UP_S = 3.0


class Scene:
    """What the acts of a drill have to do with each other."""

    def __init__(self, folder: Path, rank: int, size: int, timeout_s: float) -> None:
        self.folder = folder
        self.timeout_s = timeout_s
        self.rank = rank
        self.size = size

    @property
    def victim(self) -> int:
        """The rank on which things go wrong: the last."""
        return self.size - 1

    @property
    def is_victim(self) -> bool:
        return self.rank == self.victim

    def mark(self) -> None:
        """Notes that the fault happens now. The clock is that of all processes of the host."""
        (self.folder / "fault").write_text(repr(time.monotonic()))

    def wait_for(self, file: Path) -> None:
        """Until another rank has written it."""
        end = time.monotonic() + 30.0
        while not file.exists() and time.monotonic() < end:
            time.sleep(0.01)

    def die(self, number: signal.Signals = signal.SIGKILL) -> None:
        self.mark()
        os.kill(os.getpid(), number)

    def die_soon(self, seconds: float = 0.1, number: signal.Signals = signal.SIGKILL) -> None:
        """From a thread, while this one goes on."""
        timer = threading.Timer(seconds, self.die, (number,))
        timer.daemon = True
        timer.start()


@dataclass(frozen=True)
class Drill:
    """Something that goes wrong, and what has to come of it."""

    name: str
    act: Callable[[Scene], None]
    # The exceptions of which every survivor gets one; none: all go well.
    raises: tuple[str, ...]
    # What each survivor's message names, with {victim} for the rank.
    names: str = "rank {victim}"
    # Whom each survivor's exception blames (`.ranks`).
    blames: Literal["victim", "victim and another", "nobody"] = "victim"
    # How the victim ends: "killed", "stopped", or as the others.
    victim: str = "as the others"
    backends: tuple[str, ...] = ("native", "gloo")
    sizes: tuple[int, ...] = (2, 4)
    # The time-out of the job, and what the survivors' errors may take at most from the fault on.
    timeout_s: float = 30.0
    within_s: float = 1.0
    env: dict[str, str] = field(default_factory=dict)
    # Whether ranks join before they act; otherwise they do so when they act.
    joins: bool = True
    # What happens beside the ranks while they act; gets the scene's folder.
    beside: Callable[[Path], AbstractContextManager[None]] | None = None
    # A library that is loaded ahead of all others into the ranks, which start afresh then.
    preload: Callable[[], Path] | None = None
    # What parts of torch leave behind that fail in it.
    left_by_torch: tuple[str, ...] = ()
    # Why this machine can't perform it; empty if it can.
    obstacle: Callable[[], str] = str
    # How often `make drills` performs it: more seldom what takes long and detects nothing.
    repetitions: int = 20

    def victim_among(self, size: int) -> int:
        """The rank on which things go wrong."""
        return 0 if self.names == "rank 0" else size - 1

    @property
    def is_idle(self) -> bool:
        """Whether it mostly waits for a time-out, so that several can be performed at a time."""
        return self.timeout_s < 5.0


@dataclass
class Result:
    """Of one performance."""

    # What a survivor read, without what differs from one to the next; empty where all went well.
    text: str
    # From the fault until the last survivor knew.
    seconds: float
    left: list[str]


class FailedDrillError(AssertionError):
    """Something other came of a drill than has to."""


@dataclass(frozen=True)
class LauncherDrill:
    """Something that befalls a launcher, and what has to come of its ranks."""

    name: str
    # What is done once the ranks run. Gets a folder and how many times slower things may be;
    # raises a FailedDrillError.
    perform: Callable[[Path, float], Result]
    # What the table says that is read.
    reads: str
    repetitions: int = 20


@dataclass
class Report:
    """How a drill ended on one rank."""

    error: str | None
    message: str
    # Whom the error blames.
    ranks: tuple[int, ...]
    at: float
    left: list[str]


def perform(act: Callable[[Scene], None], folder: str, timeout_s: float, joins: bool) -> Report:
    """Acts on one rank."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    scene = Scene(Path(folder), rank, size, timeout_s)
    # What torch starts with the first backward belongs to no job.
    torch.ones(1, requires_grad=True).sum().backward()
    before = belongings()
    error, message = None, ""
    ranks: tuple[int, ...] = ()
    try:
        if joins:
            pydist.init(timeout=timeout_s)
        act(scene)
    except pydist.Error as raised:
        error, message, ranks = type(raised).__name__, str(raised), raised.ranks
    at = time.monotonic()
    pydist.shutdown()
    (scene.folder / f"told-{rank}").touch()
    return Report(error, message, ranks, at, left_since(before, TIDY_UP_S))
