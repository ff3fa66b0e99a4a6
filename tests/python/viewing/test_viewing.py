"""`pydist view`: which runs it finds, what it makes of their files, and that its page is safe."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import pydist
from pydist.cli import main
from pydist.monitoring import run_description
from pydist.monitoring.trace_mark import mark_of, trace_of_rank
from pydist.viewing.config_differences import compare
from pydist.viewing.drawn_points import drawn_points
from pydist.viewing.page import make_page
from pydist.viewing.run_folders import find_runs
from pydist.viewing.run_records import read_records
from pydist.viewing.timeline_picture import find_traces, last_step, picture

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def line(step: int, loss: Any = 1.0, **more: Any) -> dict[str, Any]:
    return {"step": step, "elapsed_s": step / 2, "values": {"loss": loss}, **more}


def write_run(folder: Path, lines: list[Any], **config: Any) -> Path:
    folder.mkdir(parents=True)
    text = "".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in lines)
    (folder / "steps.jsonl").write_text(text)
    start = {"world_size": 2, "config": config, "started": "now"}
    (folder / "config.json").write_text(json.dumps({"starts": [start]}))
    return folder


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert found is not None
    data: dict[str, Any] = json.loads(found[1])
    return data


# -- which runs


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("a/run", "b/run", "b/other"):
        write_run(tmp_path / folder, [line(1)])
    names = [run.name for run in find_runs([tmp_path, tmp_path / "b"])]
    assert names == ["a/run", "b/other", "b/run"]
    assert [run.name for run in find_runs([tmp_path / "b"])] == ["other", "run"]


def test_a_folder_without_runs_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["view", str(tmp_path)]) == 2
    assert "no steps.jsonl in" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "missing")]) == 2
    assert "is no folder" in capsys.readouterr().err


def test_the_command_writes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "a", [line(1)])
    assert main(["view", str(tmp_path / "runs")]) == 0
    page = tmp_path / "runs" / "view.html"
    assert capsys.readouterr().out == f"1 run: {page}\n"
    assert page.read_text().startswith("<!doctype html>")
    assert sorted(path.name for path in page.parent.iterdir()) == ["a", "view.html"]
    assert main(["view", str(tmp_path / "runs"), "-o", str(tmp_path / "no" / "page.html")]) == 2
    assert "Name another with -o FILE" in capsys.readouterr().err


def test_the_browser_is_opened_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []

    def show(address: str) -> bool:
        opened.append(address)
        return len(opened) == 1

    monkeypatch.setattr("webbrowser.open", show)
    write_run(tmp_path / "a", [line(1)])
    assert main(["view", str(tmp_path)]) == 0
    assert opened == []
    assert main(["view", str(tmp_path), "--open"]) == 0
    assert opened == [(tmp_path / "view.html").as_uri()]
    assert main(["view", str(tmp_path), "--open"]) == 1
    assert "found no browser" in capsys.readouterr().err


# -- what their files say


def test_what_is_not_readable_is_left_out_and_counted(tmp_path: Path) -> None:
    lines = [
        line(1, "NaN"),
        "not JSON\n",
        "[1]\n",
        '{"step": "2"}\n',
        "\n",
        line(2, "-Infinity"),
        {"step": 3, "values": 7, "ranks": [1], "elapsed_s": None},
        line(4, 10**400),
        line(5, True),
        '{"step": 6, "values": {"loss": 1',
    ]
    records = read_records(write_run(tmp_path / "a", lines))
    assert records.steps == [1, 2, 3, 4, 5]
    assert records.unreadable == 5
    first, *rest = records.curves["value:loss"]
    assert first is not None
    assert math.isnan(first)
    assert rest == [-math.inf, None, math.inf, None]
    assert records.not_finite("value:loss") == [1, 2, 4]
    assert records.known("value:loss") == []
    assert records.elapsed_s == [0.5, 1.0, 1.0, 2.0, 2.5]


def test_of_a_step_that_was_taken_twice_the_later_line_counts(tmp_path: Path) -> None:
    lines = [line(1, 3.0), line(2, 2.0), line(3, 9.0), line(2, 1.0)]
    records = read_records(write_run(tmp_path / "a", lines))
    assert records.steps == [1, 2, 3]
    assert records.curves["value:loss"] == [3.0, 1.0, 9.0]


def test_the_slowest_rank_is_that_with_the_greatest_mean_lag(tmp_path: Path) -> None:
    lags = [[0.0, 0.1, 0.0], [0.0, 0.1, 0.5], [0.2, 0.1, None], ["NaN", 0.1, 0.0]]
    lines = [line(step, ranks={"lag_s": each}) for step, each in enumerate(lags, 1)]
    slowest = read_records(write_run(tmp_path / "a", lines)).slowest
    assert slowest is not None
    assert (slowest.rank, slowest.share) == (2, 0.25)
    assert slowest.lag_s == pytest.approx(0.5 / 3)


def test_long_curves_keep_their_extremes_and_gaps() -> None:
    values: list[float | None] = [math.sin(place / 500) for place in range(50_000)]
    values[12_345], values[31_000], values[40_001], values[7] = 99.0, -99.0, math.nan, None
    kept = drawn_points(values, 100)
    assert len(kept) <= 500
    assert {0, 12_345, 31_000, 40_001, 49_999} <= set(kept)
    assert 7 not in kept
    assert kept == sorted(set(kept))
    assert drawn_points(values[:400], 100) == [place for place in range(400) if place != 7]


def test_settings_that_differ_come_first() -> None:
    runs = [
        {"world_size": 2, "config": {"lr": 0.1, "layers": [1, 2]}, "hosts": ["a", "b"]},
        {"world_size": 2, "config": {"lr": 0.2, "layers": [1, 2]}, "started": "later"},
        {},
    ]
    told = {setting.name: (setting.values, setting.differs) for setting in compare(runs[:2])}
    assert list(told) == ["config.lr", "hosts", "world_size", "config.layers"]
    assert told["config.lr"] == (("0.1", "0.2"), True)
    assert told["hosts"] == (("a, b", "—"), True)
    assert told["config.layers"] == (("[1, 2]", "[1, 2]"), False)
    assert all(setting.values[2] == "—" for setting in compare(runs))


# -- the page


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_foreign_text_is_only_text(tmp_path: Path) -> None:
    evil = EVIL.replace("/", "|")  # a folder's name has no slash
    run = write_run(tmp_path / evil, [line(1, values={EVIL: 1.0})], **{EVIL: EVIL})
    page = make_page(find_runs([run]))
    elements = _Elements()
    elements.feed(page)
    tags = [tag for tag, _ in elements.found]
    assert tags.count("script") == 3
    assert "img" not in tags
    assert not [name for _, attributes in elements.found for name in attributes if name[:2] == "on"]
    data = data_of(page)
    assert data["runs"] == [evil]
    assert data["charts"][0]["title"] == EVIL


def test_the_page_loads_nothing(tmp_path: Path) -> None:
    page = make_page(find_runs([write_run(tmp_path / "a", [line(1)])]))
    elements = _Elements()
    elements.feed(page)
    links = [value for _, a in elements.found for name in ("src", "href") if (value := a.get(name))]
    assert links == []
    assert "default-src 'none'" in page
    assert "@import" not in page
    assert "url(" not in page


def test_the_copied_library_is_the_one_that_is_declared() -> None:
    root = Path(__file__).resolve().parents[3]
    head = (root / "pydist" / "viewing" / "uplot" / "uPlot.iife.min.js").read_text()[:200]
    version = re.search(r"uPlot \(v([\d.]+)\)", head)
    assert version is not None
    row = f"| uPlot | {version[1]}, unchanged"
    assert row in (root / "third_party" / "README.md").read_text()


def test_an_empty_run_has_a_page(tmp_path: Path) -> None:
    page = make_page(find_runs([write_run(tmp_path / "a", [])]))
    assert data_of(page) == {"runs": ["a"], "charts": []}
    assert "<td>none</td>" in page


def test_what_is_not_finite_is_a_gap_and_a_note(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", [line(1), line(2, "NaN"), line(3, "Infinity"), line(4, 2.0)])
    page = make_page(find_runs([run]))
    (curve,) = data_of(page)["charts"][0]["curves"]
    assert curve["values"] == [1.0, None, None, 2.0]
    assert "loss is NaN or infinite in 2 steps, first in 2" in page


# -- timelines


def trace(rounds: int, begin: float = 0.0) -> str:
    events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}}]
    for number in range(1, rounds + 1):
        for name, at, lasts in (
            ("forward", 0.0, 10.0),
            ("backward", 10.0, 20.0),
            ("wait for averages", 30.0, 5.0),
        ):
            events.append(
                {
                    "ph": "X",
                    "name": name,
                    "pid": 0,
                    "tid": 0,
                    "dur": lasts,
                    "ts": begin + number * 100 + at,
                    "args": {"round": number},
                }
            )
        way: dict[str, Any] = {
            "cat": "on its way",
            "name": "0 <b>",
            "id": f"on its way 0 {number} 0",
        }
        base = {**way, "pid": 0, "tid": 0}
        events.append({"ph": "b", **base, "ts": number * 100 + 15.0, "args": {"bytes": 7}})
        events.append({"ph": "e", **base, "ts": number * 100 + 33.0})
    return "[\n" + ",\n".join(json.dumps(event) for event in events) + "]\n"


def test_the_last_step_that_all_ranks_have_traced_is_drawn(tmp_path: Path) -> None:
    elsewhere = tmp_path / "traces"
    elsewhere.mkdir()
    (elsewhere / "t.rank0.json").write_text(trace(3))
    # This rank was killed while it wrote its third step.
    (elsewhere / "t.rank1.json").write_text(trace(2)[:-2] + ',\n{"ph":"X","name":"forw')
    run = write_run(tmp_path / "a", [line(1)])
    (elsewhere / "t.rank2.json").write_text(trace(9))  # of a job of three ranks before
    start: dict[str, Any] = {"timeline": str(elsewhere / "t.json"), "world_size": 2}
    start["trace"] = mark_of(elsewhere / "t.rank0.json")
    traces = find_traces(run, start)
    assert sorted(traces) == [0, 1]
    lanes = last_step(traces)
    assert [lane.begin for lane in lanes] == [200.0, 200.0]
    assert lanes[0].buckets == [("0 <b>", 215.0, 233.0, 7)]
    svg = picture(lanes)
    assert svg.count("<rect") == 8
    assert "0 &lt;b&gt;" in svg
    assert find_traces(run, {}) == {}
    (run / "x.rank0.json").write_text(trace(1))
    assert sorted(find_traces(run, {"timeline": str(tmp_path / "gone" / "t.json")})) == [0]
    assert '<svg class="timeline"' in make_page(find_runs([run]))


def test_a_trace_without_steps_has_no_picture(tmp_path: Path) -> None:
    (tmp_path / "t.rank0.json").write_text("[\n]\n")
    assert last_step(find_traces(tmp_path, {})) == []


def test_a_trace_that_another_run_has_replaced_is_named_and_not_drawn(tmp_path: Path) -> None:
    timeline = tmp_path / "t.json"
    for name in ("first", "second"):
        # As the monitor does, once the trace has begun.
        run = write_run(tmp_path / name, [line(1)])
        run_description.write(run, {"timeline": str(timeline), "world_size": 1})
        trace_of_rank(timeline, 0).write_text("[\n]\n")
        assert not run_description.note_trace(run, timeline)
        trace_of_rank(timeline, 0).write_text(trace(3, begin=len(name) / 7))
        assert run_description.note_trace(run, timeline)
    page = make_page(find_runs([tmp_path]))
    assert page.count('<svg class="timeline"') == 1
    assert f"the trace {trace_of_rank(timeline, 0)} is not drawn" in page
    trace_of_rank(timeline, 0).write_text(trace(4, begin=len("first") / 7))
    assert make_page(find_runs([tmp_path / "first"])).count('<svg class="timeline"') == 1


def test_a_trace_in_the_run_s_own_folder_is_its_own(tmp_path: Path) -> None:
    """Also where the run was killed before it had noted the trace."""
    run = write_run(tmp_path / "a", [line(1)])
    run_description.write(run, {"timeline": str(run / "t.json"), "world_size": 1})
    trace_of_rank(run / "t.json", 0).write_text(trace(3))
    assert make_page(find_runs([run])).count('<svg class="timeline"') == 1


def test_a_link_gives_its_name(tmp_path: Path) -> None:
    write_run(tmp_path / "disk" / "7f3a", [line(1)])
    (tmp_path / "baseline").symlink_to(tmp_path / "disk" / "7f3a")
    (found,) = find_runs([tmp_path / "baseline"])
    assert (found.name, found.path) == ("baseline", tmp_path / "disk" / "7f3a")


def test_links_are_followed_and_each_run_is_there_once(tmp_path: Path) -> None:
    write_run(tmp_path / "disk" / "far", [line(1)])
    write_run(tmp_path / "runs" / "a", [line(1)])
    (tmp_path / "runs" / "a" / "up").symlink_to(tmp_path / "runs")
    (tmp_path / "runs" / "a" / "itself").symlink_to("itself")
    (tmp_path / "runs" / "latest").symlink_to("a")
    (tmp_path / "runs" / "far").symlink_to(tmp_path / "disk" / "far")
    (tmp_path / "runs" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "steps.jsonl").symlink_to("steps.jsonl")
    found = find_runs([tmp_path / "runs", tmp_path / "runs" / "latest"])
    paths = [tmp_path / "disk" / "far", tmp_path / "runs" / "a"]
    assert [run.path for run in found] == paths
    assert make_page(found)


@pytest.mark.usefixtures("world_of_one")
def test_what_a_monitor_writes_is_what_the_page_shows(tmp_path: Path) -> None:
    with pydist.monitor(tmp_path / "a", config={"lr": 0.5}, tensorboard=False) as monitor:
        for loss in (3.0, 2.0, float("nan")):
            monitor.step(loss=loss, samples=4)
    page = make_page(find_runs([tmp_path]))
    charts = {chart["title"]: chart["curves"] for chart in data_of(page)["charts"]}
    assert charts["loss"][0]["values"] == [3.0, 2.0, None]
    assert charts["loss"][0]["steps"] == [1, 2, 3]
    assert len(charts["Throughput of all ranks"][0]["values"]) == 3
    assert re.search(r'<th scope="row">config\.lr</th><td>0\.5</td>', page)
