"""What `pydist plan --hosts` has found: a step's times by number of hosts, printed as a table."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

from pydist.planning.step_time import Compute, StepTime

MOST_HOSTS = 1024
_FIRST_OF_MANY = 8


def numbers_of_hosts(most: int) -> list[int]:
    """1, the powers of two from 8 on, and the given number."""
    powers = [2**power for power in range(3, 11) if 2**power < most]
    return sorted({1, *powers, most})


@dataclass(frozen=True)
class ScalingRow:
    """One number of hosts.

    Attributes:
        hosts: How many.
        ranks: Of all of them.
        ddp: A step of pydist.DataParallel.
        sharded: With pydist.ShardedOptimizer; stages 1 and 2 send the same.
    """

    hosts: int
    ranks: int
    ddp: StepTime
    sharded: StepTime


@dataclass(frozen=True, repr=False)
class ScalingPlan:
    """Step times. Prints as a table, and below it what was assumed.

    Attributes:
        rows: By number of hosts, growing.
        compute: Of one rank without communication; None if nothing is known. Then rows have no
            computing time, and nothing hides communication.
        assumptions: Each a sentence.
    """

    rows: tuple[ScalingRow, ...]
    compute: Compute | None
    assumptions: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Numbers and names only, for JSON. Where no compute time is known, what depends on it is
        None."""
        compute = self.compute
        return {
            "compute_s": None
            if compute is None
            else {
                "forward": compute.forward_s,
                "backward": compute.backward_s,
                "optimizer": compute.optimizer_s,
            },
            "rows": [
                {
                    "hosts": row.hosts,
                    "ranks": row.ranks,
                    "ddp": self._numbers(row.ddp),
                    "sharded": self._numbers(row.sharded),
                }
                for row in self.rows
            ],
            "assumptions": list(self.assumptions),
        }

    def _numbers(self, time: StepTime) -> dict[str, float | None]:
        is_known = self.compute is not None
        return {
            "step_s": time.step_s if is_known else None,
            "efficiency": time.efficiency if is_known else None,
            "exposed_s": time.exposed_s if is_known else None,
            "communication_s": time.communication_s,
            "link_bytes": time.link_bytes,
        }

    def __repr__(self) -> str:
        # Only who prints a plan needs it.
        from rich.console import Console
        from rich.table import Table

        table = Table()
        table.add_column("hosts", justify="right")
        table.add_column("ranks", justify="right")
        columns = ["communication", "link"]
        if self.compute is not None:
            columns = ["step", "efficiency", "exposed", "link"]
        for name in ("DDP", "sharded"):
            for column in columns:
                table.add_column(f"{name}\n{column}", justify="right")
        for row in self.rows:
            cells = [cell for time in (row.ddp, row.sharded) for cell in self._cells(time)]
            table.add_row(str(row.hosts), str(row.ranks), *cells)
        console = Console(file=io.StringIO(), width=120)
        console.print(
            "a step by number of hosts, predicted: time, the share of it that is computing, what "
            "it waits for communication, and bytes over a host's link each way; with DataParallel, "
            "and with a sharded optimizer (stages 1 and 2 send the same)"
            if self.compute is not None
            else "communication of a step by number of hosts, predicted: time, hidden or not, and "
            "bytes over a host's link each way; with DataParallel, and with a sharded optimizer "
            "(stages 1 and 2 send the same)",
            highlight=False,
        )
        console.print(table)
        console.print("assumed:", highlight=False)
        for assumption in self.assumptions:
            console.print(f"- {assumption}", highlight=False)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined, no-any-return]

    def _cells(self, time: StepTime) -> list[str]:
        link = f"{time.link_bytes / 2**20:,.1f} MiB"
        if self.compute is None:
            return [_ms(time.communication_s), link]
        return [_ms(time.step_s), f"{time.efficiency:.1%}", _ms(time.exposed_s), link]


def _ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.2f} ms"
