"""What `pydist.plan` has found: bytes, term by term, as numbers and as a table."""

from __future__ import annotations

import io
from dataclasses import asdict, dataclass
from typing import Any

from pydist.planning.offload_estimate import HostMemory


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the rank that has the most. Ranks differ by padding only.

    Attributes:
        parameters: All of them, frozen ones too.
        buffers: Of the module.
        gradients: Those that stay until the next step.
        state: What the optimizer keeps.
        master: float32 copies of 16-bit parameters.
        buckets: Memory in which gradients travel and do not stay.
        activations: What forward saves for backward; None without a sample.
        handover: The largest gradient, which autograd makes before it lands in its place, as it
            does at least in the first two backwards. In stage 2 the largest bucket of them, which
            wait where all buffers travel.
        step: What the optimizer's step makes and frees again: its temporaries, and float32 copies
            of gradients whose parameters have such copies.
    """

    parameters: int
    buffers: int
    gradients: int
    state: int
    master: int
    buckets: int
    activations: int | None
    handover: int
    step: int

    @property
    def total(self) -> int:
        """What is there all the time."""
        return (
            self.parameters
            + self.buffers
            + self.gradients
            + self.state
            + self.master
            + self.buckets
        )

    @property
    def peak(self) -> int:
        """During backward or during the step, whichever takes more.

        When backward begins: what is there all the time, the activations if they are known, and
        gradients on their way to their places. During the step, activations are gone.
        """
        return self.total + max((self.activations or 0) + self.handover, self.step)


@dataclass(frozen=True, repr=False)
class MemoryPlan:
    """What `plan` found. Prints as a table.

    Attributes:
        ddp: pydist.DataParallel and the optimizer's class on whole parameters.
        stage1: pydist.ShardedOptimizer, stage 1.
        stage2: Stage 2.
        elements: Of all parameters.
        trained: Of those that train.
        ranks: As many share the optimizer's state.
        optimizer: The class's name.
        notes: What the figures leave out.
        host: What a sharded optimizer whose state is on the host takes there; None: there is none.
    """

    ddp: RankMemory
    stage1: RankMemory
    stage2: RankMemory
    elements: int
    trained: int
    ranks: int
    optimizer: str
    notes: tuple[str, ...] = ()
    host: HostMemory | None = None

    def to_dict(self) -> dict[str, Any]:
        """Numbers and names only, for JSON."""
        columns = {"ddp": self.ddp, "stage1": self.stage1, "stage2": self.stage2}
        return {
            "ranks": self.ranks,
            "optimizer": self.optimizer,
            "elements": self.elements,
            "trained": self.trained,
            "bytes": {
                name: {**asdict(memory), "total": memory.total, "peak": memory.peak}
                for name, memory in columns.items()
            },
            "notes": list(self.notes),
            **({} if self.host is None else {"host": asdict(self.host)}),
        }

    def __repr__(self) -> str:
        # Only who prints a plan needs it.
        from rich.console import Console
        from rich.table import Table

        table = Table()
        table.add_column("bytes per rank")
        columns = (self.ddp, self.stage1, self.stage2)
        for name in ("DDP", "stage 1", "stage 2"):
            table.add_column(name, justify="right")
        peak = "peak, without activations" if self.ddp.activations is None else "peak"
        for label, term in (
            ("parameters", "parameters"),
            ("buffers", "buffers"),
            ("gradients", "gradients"),
            ("optimizer state", "state"),
            ("float32 master copies", "master"),
            ("buckets on their way", "buckets"),
            ("all the time", "total"),
            ("activations", "activations"),
            ("gradients being made", "handover"),
            ("temporaries of the step", "step"),
            (peak, "peak"),
        ):
            if label in ("all the time", "activations", peak):
                table.add_section()
            table.add_row(label, *(_text(getattr(column, term)) for column in columns))
        if self.trained:
            table.add_section()
            each = [f"{column.total / self.trained:.2f} B" for column in columns]
            table.add_row("all the time, a trained element", *each)
        if self.host is not None:
            table.add_section()
            for label, size in (
                ("on the host: pinned", self.host.pinned),
                ("on the host: optimizer state", self.host.state),
                ("a step: gradients to the host", self.host.to_host),
                ("a step: memory of the host", self.host.stepped),
                ("a step: parameters to the GPU", self.host.to_device),
            ):
                table.add_row(label, "", _text(size), _text(size))
        console = Console(file=io.StringIO(), width=100)
        console.print(
            f"{self.elements:,} parameters, {self.trained:,} of them trained, with "
            f"{self.optimizer} on {self.ranks} rank{'s' if self.ranks != 1 else ''}",
            highlight=False,
        )
        console.print(table)
        for note in self.notes:
            console.print(f"- {note}", highlight=False)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined, no-any-return]


def _text(size_bytes: int | None) -> str:
    if size_bytes is None:
        return "?"
    value = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.4g} {unit}"
        value /= 1024
    return f"{value:,.2f} GiB"
