"""What the ranks of this host are in, as text."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from pydist.diagnosis.local_ranks import LocalRank, first_disagreement

# A heartbeat comes many times a second.
_SILENT_S = 2.0


def table_of(ranks: Sequence[LocalRank]) -> Table:
    """A row for each rank; those of the first disagreement are marked."""
    verdict, odd = first_disagreement(ranks)
    caption = verdict if verdict else "no disagreement, as far as the journals go back"
    table = Table(
        box=None,
        pad_edge=False,
        caption=f"First disagreement: {verdict}." if verdict else f"({caption})",
        caption_justify="left",
    )
    for header in ("", "rank", "pid", "process", "is"):
        table.add_column(header, overflow="fold")
    for rank in ranks:
        state = rank.state
        if rank.has_page and not rank.has_departed and rank.silent_s > _SILENT_S:
            state += f", silent for {rank.silent_s:.0f} s"
        table.add_row(
            ">>" if rank.pid in odd else "",
            "?" if rank.rank is None else str(rank.rank),
            str(rank.pid),
            state,
            rank.activity(),
            style="bold red" if rank.pid in odd else None,
        )
    return table


def as_text(ranks: Sequence[LocalRank]) -> str:
    """The same for a file."""
    text = io.StringIO()
    Console(file=text, width=160, highlight=False, markup=False).print(table_of(ranks))
    return text.getvalue()
