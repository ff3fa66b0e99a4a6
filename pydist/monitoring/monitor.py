"""`pydist.monitor`: a run writes its losses, its speed and who holds it up, step by step.

Steps are put together in chunks of `every` steps. At the end of one, each rank leaves its chunk in
the job's store (Note [No collective] in `mailbox.py`), and rank 0 writes a line for each step.
"""

from __future__ import annotations

import atexit
import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from pydist.errors import InvalidUsage, Mismatch
from pydist.job import current, groups, membership
from pydist.job.arguments import a_type
from pydist.job.log import logger
from pydist.job.outcome import failed, outcomes
from pydist.job.rank_names import culprits
from pydist.monitoring import run_description
from pydist.monitoring.chunks import Collector, Together, as_json
from pydist.monitoring.event_files import EventFiles, open_event_files
from pydist.monitoring.late_values import Number, taken
from pydist.monitoring.lines import lines_of
from pydist.monitoring.mailbox import Mailbox
from pydist.monitoring.measures import Meter, Row
from pydist.monitoring.step_file import StepFile
from pydist.parallel.wrapper import DataParallel

__all__ = ["Monitor", "monitor"]

# How often rank 0 looks for the other ranks' rows amid a chunk, at most: that is a round trip.
_LOOK_S = 0.01
# How often memory is asked for, at most: that may take the kernel a millisecond.
_MEMORY_S = 1.0

# How long rank 0 waits at the end for the last steps of the others.
_CLOSING_S = 5.0

# How many monitors this process has made: by which the ranks' know each other.
_made = 0


class _Files:
    """What rank 0 writes."""

    def __init__(self, folder: Path, first_step: int | None, tensorboard: bool | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self._steps = StepFile(folder)
        self.first_step = self._steps.last_step + 1 if first_step is None else first_step
        self._elapsed_s = self._steps.elapsed_s
        timeline = os.environ.get("PYDIST_TIMELINE")
        self._trace_to_note = Path(os.path.abspath(timeline)) if timeline else None
        try:
            self._events: EventFiles | None = open_event_files(folder, self.first_step, tensorboard)
        except BaseException:
            self._steps.close()
            raise

    def write(self, together: Together, ends: Mapping[int, float]) -> None:
        """Writes a line for each step.

        Args:
            together: The rows of each rank.
            ends: When each step ended, in seconds since 1970.
        """
        lines = []
        for line in lines_of(together):
            self._elapsed_s += line["step_s"] or 0.0
            when = {"time": round(ends[line["step"]], 3), "elapsed_s": round(self._elapsed_s, 6)}
            lines.append({"step": line["step"], **when, **line})
        self._steps.append(lines)
        if self._events is not None:
            self._events.write(lines)
        self._note_trace()

    def _note_trace(self) -> None:
        if self._trace_to_note is None:
            return
        try:
            if run_description.note_trace(self.folder, self._trace_to_note):
                self._trace_to_note = None
        except OSError as error:
            self._trace_to_note = None
            logger.warning("pydist.monitor can't note whose trace it is: %s", error)

    def close(self) -> None:
        self._steps.close()
        if self._events is not None:
            self._events.close()


class Monitor:
    """What `pydist.monitor` returns: a context manager, whose `step` ends each step.

    Attributes:
        step_number: The last step that has ended; before the first, the last one of the run's
            earlier part, or 0.
    """

    def __init__(
        self,
        meter: Meter,
        every: int,
        last_step: int,
        mailbox: Mailbox | None,
        files: _Files | None,
    ) -> None:
        self.step_number = last_step
        self._meter = meter
        self._every = every
        self._mailbox = mailbox
        self._files = files
        self._collector = Collector(mailbox, membership.world_size()) if files else None
        self._rows: list[Row] = []
        self._ends: dict[int, float] = {}
        self._chunk_number = 0
        self._is_closed = False
        self._next_look = self._next_memory = 0.0
        self._generation = current.job.generation
        self._pid = os.getpid()
        # A program that ends without `close()` loses nothing, and waits for nobody.
        atexit.register(self._end)

    def step(
        self,
        loss: float | Tensor | None = None,
        *,
        samples: float | None = None,
        **values: float | Tensor,
    ) -> None:
        """Ends a step: call it once a step, behind `optimizer.step()`, on every rank.

        Waits neither for other ranks nor for a device. The time from one call to the next is that
        of the step, with all that the program does in it.

        Args:
            loss: Of this rank's samples; a number, or a tensor that holds one, on any device. The
                line has the mean over the ranks, by their samples where all ranks tell these.
            samples: How many this rank has taken in this step: the throughput is made of them.
            values: More numbers by name, such as `lr=` or `accuracy=`; means as of the loss.

        Raises:
            InvalidUsage: a value is not one real number; `samples` is negative or not finite; the
                monitor is closed.
        """
        if self._is_closed:
            raise InvalidUsage(
                "step() of a monitor that is closed: call it within `with pydist.monitor(...)`, or "
                "make another monitor on the same folder, which goes on."
            )
        numbers: dict[str, Number | None] = {} if loss is None else {"loss": taken("loss", loss)}
        for name, value in values.items():
            numbers[name] = taken(name, value)
        count = _count(samples)
        self._complete_rows()
        self.step_number += 1
        row = self._meter.measure(self.step_number, count, numbers)
        self._rows.append(row)
        if self._files is not None:
            self._ends[row.step] = time.time()
        now = time.monotonic()
        if row.is_complete and len(self._rows) >= self._every:
            self._finish_chunk()
        elif (
            self._collector is not None and now >= self._next_look and self._collector.expects_more
        ):
            self._next_look = now + _LOOK_S
            self._guarded(self._look)

    def close(self) -> None:
        """Writes what is left. Every rank may call it, at any time; `with` does.

        Rank 0 waits up to 5 seconds for the last steps of the other ranks.
        """
        self._end(_CLOSING_S)

    def __enter__(self) -> Monitor:
        self._meter.restart()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            # The others may never come to their end.
            self._end()

    def _complete_rows(self) -> None:
        """Reads late values of the step before, and sends a chunk that waited for them."""
        if self._rows and not self._rows[-1].is_complete:
            self._rows[-1].complete()
            if len(self._rows) >= self._every:
                self._finish_chunk()

    def _finish_chunk(self) -> None:
        rows, number = self._rows, self._chunk_number
        self._rows, self._chunk_number = [], number + 1
        now = time.monotonic()
        if now >= self._next_memory or self._is_closed:
            self._next_memory = now + _MEMORY_S
            with suppress(OSError, RuntimeError):  # no descriptor is left, or the device has failed
                rows[-1].memory = self._meter.memory()
        self._guarded(self._look)
        self._guarded(lambda: self._hand_over(number, rows))

    def _hand_over(self, number: int, rows: list[Row]) -> list[Together]:
        if self._collector is None:
            if self._mailbox is not None:
                self._mailbox.post(number, as_json(rows))
            return []
        done = self._collector.add(number, rows)
        if not self._collector.expects_more:  # otherwise a later step looks
            done += self._collector.look()
        return done

    def _look(self) -> list[Together]:
        return [] if self._collector is None else self._collector.look()

    def _write(self, done: list[Together]) -> None:
        for together in done:
            assert self._files is not None
            try:
                self._files.write(together, self._ends)
            except Exception as error:  # Training goes on, and so do later lines.
                logger.warning("pydist.monitor can't write a chunk of steps: %r", error)
            for row in together[0]:
                del self._ends[row.step]

    def _guarded(self, exchange: Callable[[], list[Together]]) -> None:
        """Writes what an exchange with the store brings; without that, rank 0's own numbers."""
        try:
            done = exchange()
        except Exception as error:  # The store is gone: torch has several errors for that.
            if self._generation == current.job.generation:
                logger.warning(
                    "pydist.monitor can't reach the job's store any more (%s); from here on rank 0 "
                    "writes its own numbers alone.",
                    error,
                )
            self._mailbox = None
            done = [] if self._collector is None else self._collector.leave_others()
        self._write(done)

    def _end(self, limit_s: float = 0.0) -> None:
        # A forked child has the run's rows, its files and its store, which are the parent's.
        if self._is_closed or self._pid != os.getpid():
            return
        self._is_closed = True
        atexit.unregister(self._end)
        if self._rows and not self._rows[-1].is_complete:
            try:
                self._rows[-1].complete()
            except RuntimeError:  # The device has failed, which the program itself is told.
                self._rows[-1].give_up()
        if self._rows:
            self._finish_chunk()
        if self._collector is not None and self._files is not None:
            collector = self._collector
            self._guarded(lambda: collector.wait(limit_s))
            self._files.close()
        if self._mailbox is not None:
            with suppress(Exception):  # the store has gone, with the keys
                self._mailbox.close()


def monitor(
    folder: str | os.PathLike[str],
    *,
    model: DataParallel | None = None,
    config: Mapping[str, Any] | None = None,
    every: int = 10,
    first_step: int | None = None,
    tensorboard: bool | None = None,
) -> Monitor:
    """Writes a run's losses, speed and memory to a folder, a line a step. Every rank calls it.

    Rank 0 appends to `folder/steps.jsonl`, which names for each step the loss, the throughput, the
    bytes of gradients, and of every rank its time, its lag behind the fastest, the share of the
    step in which it waited for averages, and, once a second at the end of a chunk, its memory.
    `folder/config.json` has what the run was started with. `pydist view folder` draws both. A
    folder that holds a run already goes on with it.

    Steps neither wait for other ranks nor for a device, and what fails later than in this call is a
    warning: training goes on. Joins the job by itself (`pydist.init()`).

    Args:
        folder: Of this run; it is made. Only rank 0's has to be reachable.
        model: The `pydist.DataParallel` whose averaging is measured. Without it lines have no
            waiting, lag or bytes.
        config: What the program wants to be remembered, such as its hyper-parameters: by name,
            nested if need be. What JSON can't hold is written as its text.
        every: Steps a chunk. Ranks send their measurements, and lines are written, once a chunk: a
            run that is killed may lose so many steps, and twice as many where a rank was late. The
            same on every rank.
        first_step: The number of the next step, from 1: for training that goes on from a
            checkpoint; `pydist view` takes the later line of a step that was taken twice. By
            default the one after the last in the folder.
        tensorboard: Whether TensorBoard's event files are written to the folder as well; by default
            where `tensorboard` can be imported.

    Returns:
        The monitor; use it by `with`, and call its `step` once a step.

    Raises:
        InvalidUsage: An argument makes no sense; the folder can't be written; another run that is
            going on writes it; or tensorboard is asked for and is not installed. On all ranks.
        Mismatch: The ranks have different `every` or `first_step`.
        Timeout: A rank has not called it; the message names the rank.

    Example:
        >>> import json, pathlib, tempfile
        >>> import pydist
        >>> folder = tempfile.mkdtemp()
        >>> with pydist.monitor(folder, config={"lr": 0.1}, tensorboard=False) as monitor:
        ...     for loss in (2.0, 1.0):
        ...         monitor.step(loss=loss, samples=8)
        >>> lines = (pathlib.Path(folder) / "steps.jsonl").read_text().splitlines()
        >>> [json.loads(line)["values"] for line in lines]
        [{'loss': 2.0}, {'loss': 1.0}]
    """
    global _made
    membership.init()
    me = current.mine().membership
    assert me is not None
    files: _Files | None = None
    mailbox: Mailbox | None = None
    problem: Exception | None = None
    _made += 1
    try:
        _check(folder, model, config, every, first_step, tensorboard)
        if me.world_size > 1:
            mailbox = Mailbox(groups.store_of(me.group), str(_made), me.rank, me.world_size)
        if me.rank == 0:
            try:
                files = _Files(Path(folder), first_step, tensorboard)
            except OSError as error:
                raise InvalidUsage(
                    f"pydist.monitor can't write to {os.fspath(folder)!r}: {error}. Give a folder "
                    "that rank 0 can make and write to."
                ) from error
    except Exception as error:
        problem = error
    facts = {"every": repr(every), "first_step": repr(first_step), "number": repr(_made)}
    host = socket.gethostname()
    start = files.first_step if files is not None else None
    try:
        everybody = outcomes(
            me.communicator, "monitor", problem, {"alike": facts, "host": host, "start": start}
        )
        if problem is not None:
            raise problem
        _agree(me.communicator, everybody)
        last_step = everybody[0].facts["start"] - 1
        if files is not None:
            hosts = [each.facts["host"] for each in everybody]
            description = run_description.describe(
                config or {}, me.world_size, me.backend, hosts, last_step + 1
            )
            _write_description(files.folder, description)
        return Monitor(Meter(model, me.device), every, last_step, mailbox, files)
    except BaseException:
        if files is not None:
            files.close()
        raise


def _write_description(folder: Path, description: dict[str, Any]) -> None:
    try:
        run_description.write(folder, description)
    except OSError as error:
        logger.warning("pydist.monitor can't write %s: %s", folder / run_description.NAME, error)


def _check(
    folder: object,
    model: object,
    config: object,
    every: object,
    first_step: object,
    tensorboard: object,
) -> None:
    if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
        raise InvalidUsage(f"pydist.monitor's folder is {folder!r}; it must be a path.")
    if model is not None and not isinstance(model, DataParallel):
        raise InvalidUsage(
            f"pydist.monitor(model=) is {a_type(model)}; it must be the pydist.DataParallel that "
            "is trained, or be left out."
        )
    if config is not None and not isinstance(config, Mapping):
        raise InvalidUsage(
            f"pydist.monitor(config=) is {a_type(config)}; it must be a mapping, such as "
            "vars(arguments) of argparse."
        )
    for name, value in (("every", every), ("first_step", first_step)):
        is_whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if not is_whole and (name, value) != ("first_step", None):
            raise InvalidUsage(f"pydist.monitor({name}={value!r}): it must be a whole number >= 1.")
    if tensorboard not in (None, True, False):
        raise InvalidUsage(
            f"pydist.monitor(tensorboard={tensorboard!r}): it must be True, False or None."
        )


def _agree(communicator: Any, everybody: list[Any]) -> None:
    """Raises on all ranks alike."""
    if wrong := failed(everybody):
        first = everybody[wrong[0]]
        raise InvalidUsage(
            f"rank {wrong[0]} raised in pydist.monitor: {first.said}",
            **culprits(communicator, wrong, first.said),
        )
    for rank, each in enumerate(everybody):
        for name, fact in each.facts["alike"].items():
            expected = everybody[0].facts["alike"][name]
            if fact != expected:
                what = "the number of this monitor in its process" if name == "number" else name
                raise Mismatch(
                    f"pydist.monitor: {what} is {expected} on rank 0 and {fact} on rank {rank}; "
                    "call it on every rank, with the same arguments.",
                    **culprits(communicator, [0, rank], "called pydist.monitor differently"),
                )


def _count(samples: Any) -> float | None:
    if samples is None:
        return None
    number = taken("samples", samples)
    if not isinstance(number, float):
        raise InvalidUsage(
            f"step(samples=) is a tensor on {samples.device}, for which the step would have to "
            "wait; it must be a number, such as len(inputs)."
        )
    if not 0 <= number < float("inf"):
        raise InvalidUsage(f"step(samples={number}): it must be a number >= 0.")
    return int(number) if number.is_integer() else number
