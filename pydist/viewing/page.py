"""The page of `pydist view`: one HTML file that has everything in it, and needs nothing else.

Names and settings of runs are foreign text: what goes into the HTML is escaped, and the data of the
curves cannot end its script element. A policy in the page forbids it to load anything.

The curves are drawn by uPlot (`uplot/`), a library of 50 kB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from pydist.errors import InvalidUsage
from pydist.monitoring.run_description import starts_in
from pydist.viewing.config_differences import MISSING, compare
from pydist.viewing.drawn_points import drawn_points
from pydist.viewing.run_folders import RunFolder
from pydist.viewing.run_records import Records, read_records
from pydist.viewing.timeline_picture import find_traces, last_step, picture

_HERE = Path(__file__).parent

# No more timelines than this: they take much of the page.
_MOST_TIMELINES = 12


@dataclass(frozen=True)
class _Chart:
    """What is drawn of a curve, and in which unit: the numbers of the file times `factor`."""

    title: str
    unit: str
    factor: float = 1.0


_OF_STEPS = {
    "samples_per_s": _Chart("Throughput of all ranks", "samples/s"),
    "waiting_share": _Chart("Waiting for averages, mean of the ranks", "% of the step", 100.0),
    "lag_s": _Chart("Lag of the slowest rank behind the fastest", "ms", 1e3),
    "step_s": _Chart("Time of a step", "ms", 1e3),
    "peak_gpu_bytes": _Chart("GPU memory, peak of the fullest rank", "GiB", 2.0**-30),
    "rss_bytes": _Chart("Main memory of the fullest rank", "GiB", 2.0**-30),
    "bytes": _Chart("Gradients averaged, over all ranks", "MB/step", 1e-6),
}


@dataclass(frozen=True)
class _Run:
    folder: RunFolder
    records: Records
    starts: list[dict[str, Any]]
    traces: dict[int, Path]
    # Why there are none, for people; empty where there is nothing to say.
    why_no_traces: str

    @property
    def last_start(self) -> dict[str, Any]:
        return self.starts[-1] if self.starts else {}


def make_page(folders: Sequence[RunFolder]) -> str:
    """The page over some runs.

    Raises:
        InvalidUsage: a run can't be read.
    """
    runs = [_read(each) for each in folders]
    data = {"runs": [run.folder.name for run in runs], "charts": _charts(runs)}
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
    style = _asset("uplot/uPlot.min.css") + _asset("page.css")
    script = _asset("page.js")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{len(runs)} {_plural(len(runs), "run")} · pydist view</title>
<style>{style}</style>
</head>
<body>
<header><h1>pydist view</h1><p>{len(runs)} {_plural(len(runs), "run")}</p></header>
<noscript><p class="note">The curves need scripts to be allowed.</p></noscript>
{_bar(runs)}
<main>
<section aria-labelledby="curves"><h2 id="curves">Curves</h2>
<p class="hint">Drag over a chart to zoom in, double-click to zoom out. With the keyboard, on a
chart: <kbd>←</kbd> <kbd>→</kbd> move, <kbd>+</kbd> <kbd>-</kbd> zoom, <kbd>0</kbd> shows all.</p>
<div id="charts"></div></section>
{_summary(runs)}
{_settings(runs)}
{_timelines(runs)}
</main>
<script type="application/json" id="data">{_as_script_data(data)}</script>
<script>{_asset("uplot/uPlot.iife.min.js")}</script>
<script>{script}</script>
</body>
</html>
"""


def _read(folder: RunFolder) -> _Run:
    starts = starts_in(folder.path)
    traces: dict[int, Path] = {}
    why_no_traces = ""
    try:
        traces = find_traces(folder.path, starts[-1] if starts else {})
    except InvalidUsage as error:
        why_no_traces = str(error)
    return _Run(folder, read_records(folder.path), starts, traces, why_no_traces)


def _asset(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _as_script_data(data: Any) -> str:
    """JSON without the characters by which HTML could end the element, or begin another."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plural(count: int, word: str) -> str:
    return word if count == 1 else f"{word}s"


# -- curves


def _charts(runs: Sequence[_Run]) -> list[dict[str, Any]]:
    names = dict.fromkeys(name for run in runs for name in run.records.curves)
    values = sorted(
        (name for name in names if name.startswith("value:")), key=lambda name: name != "value:loss"
    )
    charts = []
    for name in [*values, *(name for name in _OF_STEPS if name in names)]:
        chart = _OF_STEPS.get(name) or _Chart(name.removeprefix("value:"), "")
        curves = [_curve(run.records, name, chart.factor) for run in runs]
        charts.append({"title": chart.title, "unit": chart.unit, "curves": curves})
    return charts


def _curve(records: Records, name: str, factor: float) -> dict[str, list[Any]]:
    column = records.curves.get(name, [])
    places = drawn_points(column)
    return {
        "steps": [records.steps[place] for place in places],
        "seconds": [round(records.elapsed_s[place], 3) for place in places],
        "values": [_drawn(column[place], factor) for place in places],
    }


def _drawn(value: float | None, factor: float) -> float | None:
    """To seven digits; None, which is a gap, for what is not finite."""
    if value is None or not math.isfinite(value * factor):
        return None
    return float(f"{value * factor:.7g}")


# -- the bar that stays on top


def _swatch(number: int) -> str:
    return (
        f'<svg class="swatch" viewBox="0 0 26 8" aria-hidden="true"><line class="run{number % 8} '
        f'dash{number // 8 % 3}" x1="1" y1="4" x2="25" y2="4"/></svg>'
    )


def _bar(runs: Sequence[_Run]) -> str:
    labels = "".join(
        f'<label class="run"><input type="checkbox" checked data-run="{number}">{_swatch(number)}'
        f"<span>{escape(run.folder.name)}</span></label>"
        for number, run in enumerate(runs)
    )
    return f"""<div class="bar" id="bar">
<fieldset><legend>Runs</legend>{labels}
<button type="button" id="all">all</button><button type="button" id="none">none</button></fieldset>
<fieldset><legend>Over</legend>
<label><input type="radio" name="axis" value="steps" checked>steps</label>
<label><input type="radio" name="axis" value="seconds">time</label></fieldset>
<fieldset><legend>Range</legend>
<label>from <input type="number" id="from" step="any"></label>
<label>to <input type="number" id="to" step="any"></label>
<button type="button" id="reset">show all</button></fieldset>
</div>"""


# -- tables


def _summary(runs: Sequence[_Run]) -> str:
    heads = (
        *("Run", "Steps", "Time", "Last loss", "Least loss", "Throughput", "Waiting"),
        *("Slowest rank", "Peak memory", "Ranks", "Notes"),
    )
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    rows = "".join(
        f'<tr><th scope="row">{_swatch(number)}{escape(run.folder.name)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in _summary_of(run))
        + "</tr>"
        for number, run in enumerate(runs)
    )
    return (
        '<section aria-labelledby="summary"><h2 id="summary">Summary</h2><div class="wide">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
        '<p class="hint">Throughput and waiting are medians over the steps. The slowest rank is '
        "the one whose own work, without waiting, took longest on average.</p></section>"
    )


def _summary_of(run: _Run) -> list[str]:
    records = run.records
    losses, slowest = records.known("value:loss"), records.slowest
    speed, waiting = records.median("samples_per_s"), records.median("waiting_share")
    peak = max(records.known("peak_rss_bytes"), default=None)
    on_gpu = max(records.known("peak_gpu_bytes"), default=None)
    memory = [] if peak is None else [f"{peak / 2**30:.2f} GiB"]
    memory += [] if on_gpu is None else [f"{on_gpu / 2**30:.2f} GiB on the GPU"]
    size = run.last_start.get("world_size")
    return [
        f"{records.steps[-1]:,}" if records.steps else "none",
        _duration(records.elapsed_s[-1]) if records.steps else MISSING,
        f"{losses[-1]:.4g}" if losses else MISSING,
        f"{min(losses):.4g}" if losses else MISSING,
        MISSING if speed is None else f"{_readable(speed)} samples/s",
        MISSING if waiting is None else f"{waiting:.1%}",
        MISSING
        if slowest is None
        else f"rank {slowest.rank}: {slowest.lag_s * 1e3:.3g} ms behind, "
        f"slowest in {slowest.share:.0%} of the steps",
        ", ".join(memory) or MISSING,
        MISSING if size is None else str(size),
        "; ".join(_notes(run)),
    ]


def _notes(run: _Run) -> list[str]:
    notes = []
    if len(run.starts) > 1:
        notes.append(f"started {len(run.starts)} times")
    for name in run.records.curves:
        steps = run.records.not_finite(name)
        if steps and name.startswith("value:"):
            count = f"{len(steps)} {_plural(len(steps), 'step')}"
            what = name.removeprefix("value:")
            notes.append(f"{what} is NaN or infinite in {count}, first in {steps[0]}")
    if run.why_no_traces:
        notes.append(run.why_no_traces)
    if run.records.unreadable:
        lines = _plural(run.records.unreadable, "line")
        notes.append(f"{run.records.unreadable} {lines} can't be read")
    return notes


def _readable(number: float) -> str:
    """To four digits, and no exponent where none is needed."""
    return f"{number:,.0f}" if 1000 <= abs(number) < 1e9 else f"{number:.4g}"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def _settings(runs: Sequence[_Run]) -> str:
    settings = compare([run.last_start for run in runs])
    differing = sum(setting.differs for setting in settings)
    heads = "".join(
        f'<th scope="col">{_swatch(number)}{escape(run.folder.name)}</th>'
        for number, run in enumerate(runs)
    )
    rows = "".join(
        f'<tr class="{"differs" if setting.differs else "alike"}">'
        f'<th scope="row">{escape(setting.name)}</th>'
        + "".join(f"<td>{escape(value)}</td>" for value in setting.values)
        + "</tr>"
        for setting in settings
    )
    said = f"{differing} of {len(settings)} settings differ." if len(runs) > 1 else ""
    return f"""<section aria-labelledby="settings"><h2 id="settings">Configuration</h2>
<p class="hint">{said} <label><input type="checkbox" id="alike"{"" if differing else " checked"}>
show what is alike, too</label></p><div class="wide"><table id="config"><thead><tr>
<th scope="col">Setting</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>"""


def _timelines(runs: Sequence[_Run]) -> str:
    parts: list[str] = []
    for number, run in enumerate(runs):
        lanes = last_step(run.traces)
        if lanes and len(parts) < _MOST_TIMELINES:
            parts.append(
                f'<figure data-of="{number}"><figcaption>{_swatch(number)}'
                f"{escape(run.folder.name)}</figcaption>{picture(lanes)}</figure>"
            )
    if not parts:
        return ""
    keys = (
        ("forward", "forward"),
        ("backward", "backward"),
        ("wait", "wait for averages"),
        ("bucket", "buckets on their way"),
    )
    legend = "".join(f'<span><i class="{kind}"></i>{text}</span>' for kind, text in keys)
    return (
        '<section aria-labelledby="timelines"><h2 id="timelines">The last traced step</h2>'
        f'<p class="hint keys">{legend} Point at a bar to see how long it took.</p>'
        f"{''.join(parts)}</section>"
    )
