"""The report of a part: a table of its steps, and the last that each has printed."""

from dataclasses import dataclass, field
from pathlib import Path

from gpu_parts import Step
from limited_command import Ended

# Shown of each step; the log has all.
_LAST_LINES = 80


@dataclass
class Report:
    """A file that is written anew after every step, for a machine that is gone before the end."""

    file: Path
    title: str
    log: Path
    rows: list[tuple[Step, Ended]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return all(ended.is_good for _, ended in self.rows)

    @property
    def machine(self) -> str:
        """Python, torch and the GPU, as show_python.py has told first of all."""
        lines = [line for _, ended in self.rows for line in ended.output.splitlines()]
        return next((line for line in lines if line.startswith("Python ")), "an unknown machine")

    def add(self, step: Step, ended: Ended) -> None:
        self.rows.append((step, ended))
        lines = [f"# {self.title}", "", "| step | result | seconds | tests |", "|---|---|---|---|"]
        lines += [
            f"| {step.what} | {ended.how} | {ended.took_s:.0f} | {ended.counts} |"
            for step, ended in self.rows
        ]
        for step, ended in self.rows:
            lines += ["", f"## {step.what}", "", f"    {step.command}", ""]
            shown = ended.output.splitlines()[-_LAST_LINES:]
            lines += [f"    {line}" for line in shown]
        lines += ["", f"All that was printed is in {self.log.name}."]
        self.file.write_text("\n".join(lines) + "\n")
