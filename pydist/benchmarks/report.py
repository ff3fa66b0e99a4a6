"""Results as text: nccl-tests' table, line by line while it grows, and peers side by side."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from pydist.benchmarks.collective_cases import IN_PLACE, OUT_OF_PLACE, Case
from pydist.benchmarks.noise import Ratio
from pydist.benchmarks.processes.conductor import Series
from pydist.benchmarks.results import PROBE_BYTES, Results, Row
from pydist.benchmarks.sizes import size_text
from pydist.benchmarks.tuned import Tuned, times_text, tuned_for, way_text

_PLACES = {OUT_OF_PLACE: "out-of-place", IN_PLACE: "in-place"}
# Name, width and unit of the columns of each place.
_COLUMNS = (
    ("time", 9, "(us)"),
    ("p50", 9, "(us)"),
    ("p99", 9, "(us)"),
    ("algbw", 7, "(GB/s)"),
    ("busbw", 7, "(GB/s)"),
    ("%roof", 6, ""),
    ("#wrong", 7, ""),
)
# One more, where the ranks are on several hosts.
_LINK_COLUMN = ("%link", 6, "")
_CASE_WIDTH = 12 + 13 + 9 + 7 + 6
_ACROSS_WIDTH = 13

_Columns = Sequence[tuple[str, int, str]]


def _columns(*, spans_hosts: bool) -> _Columns:
    return (*_COLUMNS[:-1], _LINK_COLUMN, _COLUMNS[-1]) if spans_hosts else _COLUMNS


def header(results: Results) -> Iterator[str]:
    """What the figures depend on, and the columns' names. Lines of comment start with #."""
    yield f"# {results.command}"
    for fact in str(results.machine).split("\n"):
        yield f"# {fact}"
    yield (
        f"# {results.ranks} ranks, {'pinned' if results.is_pinned else 'not pinned'}, one thread "
        f"each{', more than there are CPUs' if results.is_crowded else ''}"
    )
    if results.spans_hosts:
        counts = " and ".join(map(str, results.ranks_on_hosts))
        yield f"# on {len(results.ranks_on_hosts)} hosts, with {counts} ranks"
    for name, description in results.arms.items():
        yield f"# {name}: {description}"
    yield (
        "# time: of a call, mean of a turn on the slowest rank, median of the turns; p50, p99: of "
        "single calls"
    )
    yield (
        "# %roof: the roofline's share of the time; it is measured on symmetric memory, and below "
        "some KiB it is the cost of a call from Python"
    )
    if results.spans_hosts:
        yield (
            "# across: what the collective has to send between hosts, for the host with the most; "
            "%link: the share of the time that the link takes for that"
        )
    yield "#"
    columns = _columns(spans_hosts=results.spans_hosts)
    width = sum(width + 1 for _, width, _ in columns)
    places = "".join(f"{_PLACES[place]:^{width}}" for place in (OUT_OF_PLACE, IN_PLACE))
    case_width = _CASE_WIDTH + (_ACROSS_WIDTH if results.spans_hosts else 0)
    yield f"#{'':{case_width}}{places}"
    across = ("across", "(B)") if results.spans_hosts else ("", "")
    yield _titles(0, ("size", "count", "type", "redop", "root"), across[0], columns)
    yield _titles(2, ("(B)", "(elements)", "", "", ""), across[1], columns)


def _titles(index: int, case: Sequence[str], across: str, columns: _Columns) -> str:
    size, count, dtype, redop, root = case
    each = " ".join(f"{column[index]!s:>{column[1]}}" for column in columns)
    shown = f"{across:>{_ACROSS_WIDTH}}" if across else ""
    return f"#{size:>12}{count:>13}{dtype:>9}{redop:>7}{root:>6}{shown} {each} {each}"


def _number(value: float, width: int) -> str:
    digits = 3 if value < 10 else 2 if value < 100 else 1 if value < 1000 else 0
    return f"{value:>{width}.{digits}f}"


def _cells(row: Row | None, columns: _Columns) -> str:
    values: list[str] = []
    for name, width, _ in columns:
        if row is None or row.time_us is None:
            values.append(f"{'N/A':>{width}}")
        elif name == "#wrong":
            values.append(f"{'N/A' if row.wrong is None else row.wrong:>{width}}")
        elif name in ("%roof", "%link"):
            share = row.percent_of_roofline if name == "%roof" else row.percent_of_link
            values.append(f"{'N/A' if share is None else f'{share:.0f}':>{width}}")
        else:
            key = {"time": "time_us", "p50": "p50_us", "p99": "p99_us"}.get(name, name)
            values.append(_number(getattr(row, key), width))
    return " ".join(values)


def line(rows: Sequence[Row], arm: str, *, spans_hosts: bool = False) -> str:
    """One size of one arm, both places beside each other."""
    own = {row.place: row for row in rows if row.arm == arm}
    case = next(iter(own.values()))
    across = ""
    if spans_hosts:
        shown = "N/A" if case.across_bytes is None else f"{case.across_bytes:.0f}"
        across = f"{shown:>{_ACROSS_WIDTH}}"
    columns = _columns(spans_hosts=spans_hosts)
    return (
        f" {case.size_bytes:>12}{case.count:>13}{case.type:>9}{case.redop:>7}{case.root:>6}"
        f"{across} {_cells(own.get(OUT_OF_PLACE), columns)} {_cells(own.get(IN_PLACE), columns)}"
    )


def footer(results: Results) -> Iterator[str]:
    """What nccl-tests says at the end."""
    bandwidths = [
        row.busbw for row in results.rows if row.arm == results.main and row.busbw is not None
    ]
    verdict = "OK" if results.wrong == 0 else "FAILED"
    if all(row.wrong is None for row in results.rows):
        verdict = "not checked"
    yield f"# Out of bounds values : {results.wrong} {verdict}"
    mean = sum(bandwidths) / len(bandwidths) if bandwidths else 0.0
    yield f"# Avg bus bandwidth    : {mean:.4f}"
    if results.state_us:
        text = _over_time(results.state_us, "us")
        yield f"# State of the machine  : an all_reduce of {size_text(PROBE_BYTES)} takes {text}"
    if results.core_to_core_ns:
        text = _over_time(results.core_to_core_ns, "ns")
        yield f"# From core to core     : a cache line takes {text}"
    for row in results.rows:
        if row.low_us is not None and row.high_us is not None and row.arm == results.main:
            yield (
                f"# Two states at {size_text(row.size_bytes)}, {_PLACES[row.place]}: "
                f"{_number(row.low_us, 0)} us in {row.share_low:.0%} of the rounds, "
                f"{_number(row.high_us, 0)} us in the others"
            )
    for arm, reasons in results.unsupported().items():
        yield f"# N/A of {arm}: {'; '.join(sorted(reasons))}"
    if not results.is_complete:
        yield "# Not everything was measured; this is what there is."


def tuned_lines(
    cases: Sequence[Case], memory: str, of_ranks: Sequence[Sequence[Tuned]]
) -> Iterator[str]:
    """What the tuner has chosen for each case, and what the candidates took.

    Args:
        cases: one for each size.
        memory: where the buffers lie: "ordinary" or "symmetric".
        of_ranks: what each rank knows, in rank order.
    """
    for case in cases:
        known = tuned_for(case, memory, of_ranks)
        text = "as is usual"
        if known is not None:
            times = times_text(known.times_us, memory)
            text = way_text(known.way, memory) + (f" ({times})" if times else "")
        yield f"# In use, {case.collective} {size_text(case.size_bytes)}: {text}"


def _over_time(values: Sequence[float], unit: str) -> str:
    """Measured before the first size, after each, and so after all: one value or more."""
    first, *later = (_number(each, 0) for each in values)
    text = f"{first} {unit} before"
    if len(values) > 2:
        low, high = min(values[1:-1]), max(values[1:-1])
        text += f", {_number(low, 0)} to {_number(high, 0)} {unit} between"
    return text + (f", {later[-1]} {unit} after" if later else "")


def comparison_cells(series: Sequence[Series], main: str) -> dict[str, tuple[float, Ratio | None]]:
    """The cells of one size: each arm's µs, and how many times as long as the main arm it takes.

    Like is compared with like: in place where both can, otherwise out of place.
    """
    able = {(one.arm, one.case.place): one for one in series if one.unsupported is None}
    cells: dict[str, tuple[float, Ratio | None]] = {}
    for place in (IN_PLACE, OUT_OF_PLACE):
        for arm in dict.fromkeys(one.arm for one in series):
            one, own = able.get((arm, place)), able.get((main, place))
            if one is not None and own is not None and arm not in cells:
                cells[arm] = (one.seconds * 1e6, None if arm == main else one.ratio_to(own))
    return cells


def comparison(
    results: Results, sizes: Sequence[tuple[str, int, dict[str, tuple[float, Ratio | None]]]]
) -> Table:
    """All arms side by side: times, and ratios to the main arm.

    Args:
        results: for the arms.
        sizes: of each measured size what it is, its bytes, and its `comparison_cells`.
    """
    others = results.peers
    table = Table(
        title=f"time of each arm, and how many times {results.main}'s",
        caption="in place where both can; ratios: median of the rounds (middle 95 % of a "
        "bootstrap); ?: holds 1",
    )
    table.add_column("case", no_wrap=True)
    for column in ("size", f"{results.main} µs"):
        table.add_column(column, justify="right", no_wrap=True)
    for arm in others:
        table.add_column(f"{arm} µs", justify="right", no_wrap=True)
        table.add_column(f"{arm} / {results.main}", justify="right", no_wrap=True)
    for case, size_bytes, cells in sizes:
        texts = []
        for arm in [results.main, *others]:
            seconds, ratio = cells.get(arm, (None, None))
            texts.append("N/A" if seconds is None else _number(seconds, 0).strip())
            if arm != results.main:
                unclear = "" if ratio is None or ratio.tells else " ?"
                texts.append("N/A" if ratio is None else f"{ratio}{unclear}")
        table.add_row(case, size_text(size_bytes), *texts)
    return table
