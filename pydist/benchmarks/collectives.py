"""`pydist bench all_reduce` and its kin: a sweep over sizes, on pydist and on what it is compared
with."""

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.measure import Measurement

from pydist.benchmarks import machine, plot, report
from pydist.benchmarks.collective_cases import COLLECTIVES, Case, cases_of
from pydist.benchmarks.interruption import INTERRUPTED, ignore_interruptions
from pydist.benchmarks.link_bytes import busiest_host
from pydist.benchmarks.noise import Ratio, is_noisy
from pydist.benchmarks.outputs import require_writable, write_text_whole
from pydist.benchmarks.processes import peers
from pydist.benchmarks.processes.conductor import Conductor, Effort, Series
from pydist.benchmarks.processes.job import count_ranks, launched_placement
from pydist.benchmarks.processes.link_arm import sent_in_job
from pydist.benchmarks.processes.ranks import (
    LINK,
    ROOFLINE,
    FoundRanks,
    Ranks,
    start_mpi_ranks,
    start_torch_ranks,
)
from pydist.benchmarks.progress import Progress
from pydist.benchmarks.results import BOUNDS, PROBE_BYTES, Results, rows_of
from pydist.benchmarks.sizes import parse_size, size_text, sweep
from pydist.benchmarks.subcommand import add_ranks_argument
from pydist.benchmarks.tuned import Tuned
from pydist.errors import Error, InvalidUsage
from pydist.job.launchers import Placement
from pydist.topology.placement import placement_of_job

# By what -R means to nccl-tests: 1, registration with a network card, has no counterpart here.
_REGISTRATION = {"0": "pydist", "2": "symmetric"}
# "again": the main arm once more, which shows what the machine does by itself.
COMPARABLE = ("pydist", "symmetric", "shared", "again", "gloo", *peers.PEERS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags: nccl-tests' where it has them."""
    add = parser.add_argument
    add_ranks_argument(parser)
    add("-b", "--minbytes", default="8", metavar="SIZE", help="first size (default: 8)")
    add("-e", "--maxbytes", default="64M", metavar="SIZE", help="last size (default: 64M)")
    add("-f", "--stepfactor", type=float, metavar="F", help="sizes grow by this (default: 4)")
    add("-i", "--stepbytes", metavar="SIZE", help="sizes grow by so much instead")
    add("-n", "--iters", type=int, metavar="N", help="calls in a turn (default: 5 ms of them)")
    add("-w", "--warmup_iters", type=int, default=5, metavar="N", help="untimed (default: 5)")
    add("-c", "--check", type=int, default=1, metavar="N", help="checked calls (default: 1)")
    add("-d", "--datatype", metavar="TYPES", help="one, several, or all (default: float32)")
    add("-o", "--op", metavar="OPS", help="sum (default), prod, min, max, avg, several, or all")
    add("-r", "--root", metavar="RANKS", help="one, several, or all (default: 0)")
    add("-R", "--local_register", default="0", metavar="0|2", help="2: on symmetric memory")
    add("--seconds", type=float, default=1.0, help="for each size, all arms (default: 1)")
    add("--backend", help="of pydist (default: PYDIST_BACKEND)")
    add("--compare", default="", metavar="ARMS", help=f"any of {', '.join(COMPARABLE)}")
    add("--peers", type=Path, metavar="FOLDER", help="with the MPIs (default: build/peers)")
    add("-v", "--verbose", action="store_true", help="tell what the tuner has chosen, by size")
    add("--no-pin", dest="pin", action="store_false", help="leave ranks to the scheduler")
    add("-J", "--json", type=Path, metavar="FILE", help="everything, with the machine")
    add("--csv", type=Path, metavar="FILE", help="a row for each size, place and arm")
    add("--plot", type=Path, metavar="FILE", help=f"a picture ({', '.join(plot.SUFFIXES)})")


class _Request:
    """The options, once they make sense.

    Raises:
        InvalidUsage: they don't; nothing has been started.
    """

    def __init__(self, options: argparse.Namespace, placement: Placement | None) -> None:
        self.options = options
        self.ranks = count_ranks(options.ranks, placement)
        factor = options.stepfactor
        step = None if options.stepbytes is None else parse_size(options.stepbytes)
        _require_meaning(options)
        first, last = parse_size(options.minbytes), parse_size(options.maxbytes)
        sizes = sweep(first, last, 4.0 if factor is None and step is None else factor, step)
        chosen = [options.collective] if options.collective != "all" else list(COLLECTIVES)
        self.cases = [
            cases
            for collective in chosen
            for cases in cases_of(
                collective,
                sizes,
                self.ranks,
                dtypes=options.datatype or "float32",
                ops=options.op or "sum",
                roots=options.root or "0",
            )
        ]
        for name, least in (("iters", 1), ("warmup_iters", 0), ("check", 0), ("seconds", 0)):
            value = getattr(options, name)
            if value is not None and not least <= value < math.inf:
                raise InvalidUsage(f"--{name} {value:g}: must be {least} or more.")
        self.effort = Effort(options.seconds, options.iters, options.warmup_iters, options.check)
        if options.local_register not in _REGISTRATION:
            raise InvalidUsage(
                f"-R {options.local_register}: 0 for ordinary tensors, 2 for symmetric memory "
                "(1, registration with a network card, has no meaning on a host)."
            )
        self.main = _REGISTRATION[options.local_register]
        self.compared = _compared(options.compare, self.main)
        folder = peers.default_folder() if options.peers is None else options.peers
        self.mpis = [peers.find(name, folder) for name in self.compared if name in peers.PEERS]
        self.torch_arms = [self.main, ROOFLINE]
        self.torch_arms += [name for name in self.compared if name not in peers.PEERS]
        self.largest = max(case.size_bytes for cases in self.cases for case in cases)
        on_one_host = placement is None or placement.local_world_size == self.ranks
        # Two buffers for each kind of memory: ordinary, symmetric, shared, and an MPI's. Those of
        # the link between hosts are twice as large.
        kinds = 2 + ("shared" in self.compared) + len(self.mpis) + (0 if on_one_host else 2)
        count_ranks(options.ranks, placement, 2 * kinds * self.largest)
        if self.mpis and not on_one_host:
            raise InvalidUsage("--compare with an MPI runs on one host; these ranks are on more.")

    def require_outputs(self) -> None:
        for path in (self.options.json, self.options.csv, self.options.plot):
            if path is not None:
                require_writable(path)
        if self.options.plot is not None:
            plot.require_plots(self.options.plot)


def _require_meaning(options: argparse.Namespace) -> None:
    """Refuses flags that the collective has no use for."""
    if options.collective == "all":
        return
    kind = COLLECTIVES[options.collective]
    for flag, value, has_meaning in (
        ("-o", options.op, kind.has_op),
        ("-r", options.root, kind.has_root),
        ("-d", options.datatype, options.collective != "barrier"),
    ):
        if value is not None and not has_meaning:
            raise InvalidUsage(f"{flag} {value}: means nothing to {options.collective}.")


def _compared(given: str, main_arm: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in COMPARABLE:
            raise InvalidUsage(f"--compare {name}: unknown; use any of {', '.join(COMPARABLE)}.")
    return [name for name in dict.fromkeys(names) if name != main_arm]


class _Output:
    """Shows and writes results as they come, on the process that leads."""

    def __init__(self, request: _Request, results: Results) -> None:
        self._request = request
        self._results = results
        self._cells: list[tuple[str, int, dict[str, tuple[float, Ratio | None]]]] = []
        self._noisy: list[str] = []
        self._case = ""
        self._progress = Progress()
        self._unwritten: set[Path] = set()

    @property
    def is_written(self) -> bool:
        """Whether all files that were asked for hold everything."""
        return not self._unwritten

    def begin(self) -> None:
        for text in report.header(self._results):
            print(text, flush=True)

    def note(self, text: str) -> None:
        self._progress.detail(f"{self._case}, {text}")

    def begin_case(self, cases: Sequence[Case]) -> None:
        case = cases[0]
        self._case = f"{case.collective} {case.dtype} {size_text(case.size_bytes)}"

    def add(self, series: Sequence[Series]) -> None:
        rows = rows_of(series, self._across_bytes(series))
        is_first = all(row.collective != rows[0].collective for row in self._results.rows)
        self._results.rows.extend(rows)
        case = series[0].case
        op = f" {case.op}" if case.kind.has_op else ""
        cells = report.comparison_cells(series, self._results.main)
        self._cells.append((f"{case.collective} {case.dtype}{op}", case.size_bytes, cells))
        own = [one for one in series if one.arm == self._results.main]
        if any(is_noisy(one.rounds) for one in own if one.rounds):
            self._noisy.append(size_text(case.size_bytes))
        self._write()
        self._progress.clear()
        if is_first:
            print(f"# {case.collective}")
        spans_hosts = self._results.spans_hosts
        print(report.line(rows, self._results.main, spans_hosts=spans_hosts), flush=True)

    def _across_bytes(self, series: Sequence[Series]) -> float | None:
        """What the cases, which differ in place only, have to send between hosts."""
        link = next((one for one in series if one.arm == LINK), None)
        if link is None or link.unsupported is not None:
            return None
        return busiest_host(sent_in_job(link.case), placement_of_job())

    def _write(self) -> None:
        options = self._request.options
        self._try_to_write(
            options.json, lambda path: write_text_whole(path, self._results.as_json())
        )
        self._try_to_write(options.csv, lambda path: write_text_whole(path, self._results.as_csv()))

    def _try_to_write(self, path: Path | None, write: Callable[[Path], None]) -> None:
        """A full disk ends no measurement; it is said once."""
        if path is None:
            return
        try:
            write(path)
            self._unwritten.discard(path)
        except Error as error:
            if path not in self._unwritten:
                self._progress.clear()
                print(f"pydist bench: {error}", file=sys.stderr)
            self._unwritten.add(path)

    def tell_tuned(
        self, cases: Sequence[Sequence[Case]], of_ranks: Sequence[Sequence[Tuned]]
    ) -> None:
        """Prints what was in use at the end, for each size."""
        self._progress.clear()
        memory = "symmetric" if self._results.main == "symmetric" else "ordinary"
        for text in report.tuned_lines([each[0] for each in cases], memory, of_ranks):
            print(text, flush=True)

    def fail(self, error: Error) -> None:
        """Says what went wrong, here and in what is written."""
        self._progress.clear()
        print(f"pydist bench: {error}", file=sys.stderr)
        self._results.warnings.append(str(error).rstrip("."))

    def end(self) -> None:
        self._progress.clear()
        if self._noisy:
            sizes = ", ".join(dict.fromkeys(self._noisy))
            self._results.warnings.append(
                f"the machine was too noisy to tell small differences at {sizes}: something else "
                "used it, or the processor's speed changed"
            )
        if self._results.have_cores_moved:
            self._results.warnings.append(
                "the machine's cores were nearer to each other at one time than at another (from "
                "core to core, above): times of one size don't compare with those of another"
            )
        for text in report.footer(self._results):
            print(text)
        if self._results.peers and self._cells:
            print(flush=True)
            table = report.comparison(self._results, self._cells)
            # As wide as it is: rich would cut columns off to fit a narrow terminal.
            console = Console()
            options = console.options.update(max_width=1000)
            console.width = max(console.width, Measurement.get(console, options, table).maximum)
            console.print(table)
        for text in self._results.warnings:
            print(f"# Warning: {text}.", flush=True)
        self._write()
        if self._results.rows:
            self._try_to_write(
                self._request.options.plot, lambda path: plot.draw(self._results, path)
            )


def _start(request: _Request, placement: Placement | None, stack: ExitStack) -> list[Ranks]:
    """The ranks of all arms; those of torch first."""
    pin = request.options.pin
    groups: list[Ranks] = []
    for installation in request.mpis:
        # Before this process is pinned, as it is where it is a rank itself: they inherit it.
        groups.append(
            start_mpi_ranks(installation, request.ranks, pin=pin, is_launched=placement is not None)
        )
        stack.callback(groups[-1].close)
    if placement is not None:
        own: Ranks = FoundRanks(request.torch_arms, backend=request.options.backend, pin=pin)
    else:
        own = start_torch_ranks(
            request.torch_arms, request.ranks, backend=request.options.backend, pin=pin
        )
    stack.callback(own.close)
    return [own, *groups]


def _ranks_on_hosts(own: Ranks, ranks: int) -> tuple[int, ...]:
    if isinstance(own, FoundRanks):
        return tuple(map(len, own.placement.ranks_on))
    return (ranks,)


def _note_state(results: Results, conductor: Conductor) -> None:
    """Measures the state of the machine, which may change at any time."""
    ((probe, *_),) = cases_of("all_reduce", [PROBE_BYTES], results.ranks)
    results.state_us.append(conductor.probe(results.main, probe) * 1e6)
    # A scheduler that may move ranks does so, whatever the machine does.
    if results.is_pinned and not results.is_crowded:
        distance_ns = conductor.distance_ns()
        if distance_ns is not None:
            results.core_to_core_ns.append(distance_ns)


def _lead(request: _Request, placement: Placement | None) -> int:
    facts = machine.describe()
    with ExitStack() as stack:
        Progress().detail(f"starting {request.ranks} ranks of {1 + len(request.mpis)} kinds")
        groups = _start(request, placement, stack)
        conductor = Conductor(groups, request.effort)
        descriptions = conductor.reserve(max(request.largest, PROBE_BYTES))
        names = [request.main, *BOUNDS, *request.compared]
        results = Results(
            command=f"pydist bench {request.options.collective} {request.options.flags}".strip(),
            machine=facts,
            ranks=request.ranks,
            is_pinned=request.options.pin,
            # The link is one of them where there are several hosts.
            arms={name: descriptions[name] for name in names if name in descriptions},
            rows=[],
            warnings=[],
            ranks_on_hosts=_ranks_on_hosts(groups[0], request.ranks),
        )
        output = _Output(request, results)
        output.begin()
        status = 0
        try:
            _note_state(results, conductor)
            for cases in request.cases:
                output.begin_case(cases)
                output.add(conductor.measure(cases, output.note))
                _note_state(results, conductor)
            if request.options.verbose:
                output.tell_tuned(request.cases, conductor.tuned(request.main))
            results.is_complete = True
        except KeyboardInterrupt:
            # What there is is still to be written; a second Ctrl-C would take it away.
            ignore_interruptions()
            status = INTERRUPTED
        except Error as error:
            output.fail(error)
            status = 1
        output.end()
        return status or int(results.wrong > 0 or results.failed or not output.is_written)


def main(options: argparse.Namespace) -> int:
    """Measures; under a launcher every rank calls it.

    Args:
        options: as `add_arguments` has them; `collective`: a name or "all"; `flags`: as given.

    Returns:
        0; 1 where a result was wrong or a rank failed; 130 when interrupted.

    Raises:
        InvalidUsage: the options make no sense; nothing was measured.
    """
    placement = launched_placement()
    leads = placement is None or placement.rank == 0
    try:
        request = _Request(options, placement)
        if leads:
            request.require_outputs()
    except InvalidUsage:
        if leads:
            raise
        # Rank 0 says it; it would be ended by its launcher if another rank left before it.
        time.sleep(2)
        return 2
    if leads:
        return _lead(request, placement)
    found = FoundRanks(request.torch_arms, backend=options.backend, pin=options.pin)
    try:
        found.serve()
    finally:
        found.close()
    return 0
