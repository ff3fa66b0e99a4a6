"""Results as a picture: latency and bus bandwidth against size.

Lines differ by marker and dash as well as by colour, so that a black and white print tells them
apart.
"""

import importlib.util
import io
import itertools
from pathlib import Path
from typing import Any

from pydist.benchmarks.collective_cases import IN_PLACE
from pydist.benchmarks.outputs import write_whole
from pydist.benchmarks.results import BOUNDS, Results, Row
from pydist.benchmarks.sizes import size_text
from pydist.errors import InvalidUsage

SUFFIXES = (".png", ".svg", ".pdf")
_STYLES = (("o", "-"), ("s", "-"), ("^", "--"), ("D", "-."), ("v", ":"), ("P", (0, (5, 1))))


def require_plots(path: Path) -> None:
    """Sees to it that a plot can be made.

    Raises:
        InvalidUsage: the file's kind is unknown, or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise InvalidUsage(f"--plot {path}: the name must end in {', '.join(SUFFIXES)}.")
    if importlib.util.find_spec("matplotlib") is None:
        raise InvalidUsage("--plot needs matplotlib: pip install matplotlib.")


def _lines(results: Results, collective: str) -> dict[str, dict[int, Row]]:
    """The lines of a panel by name, each by size.

    An arm has one for each type, operation and root that was measured; in place where it can.
    """
    rows = [row for row in results.rows if row.collective == collective and row.time_us is not None]
    variants = {(row.type, row.redop, row.root) for row in rows}
    lines: dict[str, dict[int, Row]] = {}
    for row in sorted(rows, key=lambda row: row.place != IN_PLACE):
        variant = f" {row.type} {row.redop} {row.root}" if len(variants) > 1 else ""
        lines.setdefault(row.arm + variant, {}).setdefault(row.size_bytes, row)
    return {name: dict(sorted(points.items())) for name, points in lines.items()}


def draw(results: Results, path: Path) -> None:
    """Writes the plot: for each collective two panels, for each arm a line.

    Args:
        results: with one row or more.
        path: a file that ends in one of SUFFIXES.

    Raises:
        Error: the file can't be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(row.collective for row in results.rows if row.size_bytes))
    if not names:
        return
    figure, panels = pyplot.subplots(
        len(names), 2, figsize=(11, 4.2 * len(names)), squeeze=False, layout="constrained"
    )
    for name, (latency, bandwidth) in zip(names, panels, strict=True):
        _draw_collective(results, name, latency, bandwidth)
    figure.suptitle(f"{results.machine.processor}, {results.ranks} ranks")
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=path.suffix.lower().removeprefix("."))
    pyplot.close(figure)
    write_whole(path, content.getvalue())


def _draw_collective(results: Results, name: str, latency: Any, bandwidth: Any) -> None:
    styles = itertools.cycle(_STYLES)
    for label, points in _lines(results, name).items():
        style: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1}
        if not label.startswith(BOUNDS):
            marker, dash = next(styles)
            style = {"marker": marker, "linestyle": dash, "markersize": 4, "linewidth": 1.3}
        sizes = list(points)
        latency.plot(sizes, [row.time_us for row in points.values()], label=label, **style)
        bandwidth.plot(sizes, [row.busbw for row in points.values()], label=label, **style)
    for axes, what in ((latency, "time of a call (µs)"), (bandwidth, "bus bandwidth (GB/s)")):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_title(name)
        axes.set_xlabel("size")
        axes.set_ylabel(what)
        axes.xaxis.set_major_formatter(lambda size, _: size_text(int(size)))
        axes.grid(True, which="major", linewidth=0.3)
        axes.legend(fontsize=8)
