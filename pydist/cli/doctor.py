"""`pydist doctor`: before a run, what would go wrong; of a run, what every rank is in."""

import argparse
import json
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import pydist
from pydist.cli.machine_checks import Finding, between_ranks, facts, on_this_machine
from pydist.diagnosis.local_ranks import find, first_disagreement
from pydist.diagnosis.report import table_of
from pydist.diagnosis.stacks import stacks_of
from pydist.errors import Error, InvalidUsage
from pydist.job.launchers import read_placement

_MEETING_S = 60.0
_STYLES = {"fine": "green", "warning": "yellow", "problem": "bold red"}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pydist doctor",
        description=(
            "Looks for what a run would fail by: shared and locked memory, descriptors, processes, "
            "ports, interfaces, cores, variables. Started on every rank by a launcher (`pydist run "
            "-n 2 -m pydist doctor`), it also compares the ranks: versions, clocks, cores."
        ),
        epilog="Ends with status 1 where it finds a problem.",
    )
    parser.add_argument(
        "pid",
        nargs="?",
        type=int,
        help="of a rank that runs or hangs, or of its launcher: shows what every rank of this host "
        "is in, marks the first disagreement, and prints Python stacks where they can be had (of "
        "ranks started with PYDIST_DUMP, or where py-spy is installed)",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    return parser


def _look_into(pid: int, *, as_json: bool) -> int:
    """Shows what the ranks are in that belong to a process."""
    ranks = find(pid)
    verdict, _ = first_disagreement(ranks)
    if as_json:
        told = [{**asdict(rank), "is": rank.activity()} for rank in ranks]
        print(json.dumps({"ranks": told, "first_disagreement": verdict or None}))
        return int(bool(verdict))
    console = Console(highlight=False, markup=False)
    console.print(table_of(ranks))
    for rank in ranks:
        name = f"pid {rank.pid}" if rank.rank is None else f"rank {rank.rank} (pid {rank.pid})"
        console.print(f"\nStacks of {name}:\n{stacks_of(rank.pid)}")
    return int(bool(verdict))


def _world_size() -> int:
    try:
        return read_placement().world_size
    except InvalidUsage:  # one of the findings
        return 1


def _examine() -> list[tuple[str, Finding]]:
    """Who found what; on ranks other than 0 of a job, nothing."""
    own = on_this_machine()
    if _world_size() == 1:
        return [(socket.gethostname(), each) for each in own]
    try:
        # gloo goes everywhere; what else serves, `init` of the program says.
        pydist.init("gloo", timeout=_MEETING_S)
        # All come out of it at about the same time.
        pydist.barrier()
        told: list[Any] = [None] * pydist.world_size()
        dist.all_gather_object(told, {"findings": [asdict(each) for each in own], "facts": facts()})
    except Error as error:
        failed = Finding("the ranks of the job", "problem", f"do not come together: {error}")
        return [(socket.gethostname(), each) for each in (*own, failed)]
    rank = pydist.rank()
    pydist.shutdown()
    if rank != 0:
        return []
    found: dict[tuple[str, str, str], list[str]] = {}
    for number, each in enumerate(told):
        for finding in each["findings"]:
            found.setdefault(tuple(finding.values()), []).append(str(number))
    result = [
        (f"rank {', '.join(ranks)}" if len(ranks) < len(told) else "all ranks", Finding(*finding))  # type: ignore[arg-type]
        for finding, ranks in found.items()
    ]
    return [*result, *(("all ranks", each) for each in between_ranks([t["facts"] for t in told]))]


def _print(found: list[tuple[str, Finding]]) -> None:
    table = Table(box=None, pad_edge=False)
    for header in ("", "what", "where", "found"):
        table.add_column(header, overflow="fold", no_wrap=header == "")
    for where, finding in found:
        table.add_row(
            finding.verdict, finding.subject, where, finding.text, style=_STYLES[finding.verdict]
        )
    Console(highlight=False, markup=False).print(table)


def main(arguments: Sequence[str]) -> int:
    """Says what would go wrong, or what the ranks of a job are in.

    Args:
        arguments: what follows `pydist doctor` on the command line.

    Returns:
        0, 1 where there is a problem or the ranks disagree, or 2 for bad usage.
    """
    try:
        given = _parser().parse_args(list(arguments))
    except SystemExit as end:
        return int(end.code or 0)
    if given.pid is not None:
        return _look_into(given.pid, as_json=given.json)
    found = _examine()
    if given.json:
        if found:
            print(json.dumps([{"where": where, **asdict(each)} for where, each in found]))
    elif found:
        _print(found)
    return int(any(each.verdict == "problem" for _, each in found))
