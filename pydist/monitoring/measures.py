"""What one rank measures of each of its steps."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass, field

import torch

from pydist.gpu.late_number import LateNumber
from pydist.monitoring.late_values import Number
from pydist.parallel.wrapper import DataParallel

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Row:
    """One step of one rank. What is None was not measured.

    Attributes:
        step: Its number in the run.
        step_s: Seconds since the end of the step before.
        waiting_s: Of these, in which the training thread launched averages and waited for them.
        bytes: Bytes of gradients that were averaged.
        samples: Of this rank.
        values: What the program reports.
        memory: Bytes of main memory now and at most, and of the GPU now and at most.
    """

    step: int
    step_s: float
    waiting_s: float | None
    bytes: int | None
    samples: float | None
    values: dict[str, Number | None] = field(default_factory=dict)
    memory: list[int | None] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        """Whether no value is on its way from a device any more."""
        return not [value for value in self.values.values() if isinstance(value, LateNumber)]

    def complete(self) -> None:
        """Reads the values that were on their way."""
        for name, value in self.values.items():
            if isinstance(value, LateNumber):
                self.values[name] = value.read()

    def give_up(self) -> None:
        """Leaves out the values that were on their way: their device may have failed."""
        for name, value in self.values.items():
            if isinstance(value, LateNumber):
                self.values[name] = None


class Meter:
    """Measures the steps of this rank.

    Args:
        model: Whose averaging is measured, if any.
        device: This rank's, for the memory of a GPU.
    """

    def __init__(self, model: DataParallel | None, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._before = self._averaging()
        self._since = time.perf_counter()

    def restart(self) -> None:
        """The next step begins now."""
        self._before = self._averaging()
        self._since = time.perf_counter()

    def measure(self, step: int, samples: float | None, values: dict[str, Number | None]) -> Row:
        """Ends a step; the row keeps `values`."""
        now, averaging = time.perf_counter(), self._averaging()
        row = Row(step, now - self._since, None, None, samples, values)
        if averaging is not None and self._before is not None:
            resets, waiting_s, moved = averaging
            # The program may have called `reset_stats()` since.
            base = self._before if resets == self._before[0] else (0, 0.0, 0)
            row.waiting_s = max(0.0, waiting_s - base[1])
            row.bytes = moved - base[2]
        self._before, self._since = averaging, now
        return row

    def memory(self) -> list[int | None]:
        """Bytes of main memory now and at most, of the GPU's now and at most. Waits for nothing."""
        with open("/proc/self/statm") as file:
            resident = int(file.read().split()[1]) * _PAGE_BYTES
        # In KiB on Linux. The kernel updates it late, so it may be less than what is there now.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found: list[int | None] = [resident, max(peak, resident), None, None]
        if self._device.type == "cuda":
            found[2] = torch.cuda.memory_allocated(self._device)
            found[3] = torch.cuda.max_memory_allocated(self._device)
        return found

    def _averaging(self) -> tuple[int, float, int] | None:
        if self._model is None:
            return None
        stats = self._model.stats()
        return self._model.stats_resets, stats.exposed_s, stats.bytes
