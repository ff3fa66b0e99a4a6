"""The page of `pydist view` in a real browser: curves, legend, range, keyboard, no errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from pydist.cli import main

pytestmark = pytest.mark.timeout(120)

STEPS = 3000


def write_run(folder: Path, shift: float, lr: float, steps: int = STEPS) -> None:
    """A run of two ranks, the second of which is slow."""
    folder.mkdir(parents=True)
    with (folder / "steps.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            loss: float | str = 2 / math.sqrt(step) + shift + 0.03 * math.sin(step * 1.7)
            if step == 500:
                loss = "NaN"
            ranks = {"lag_s": [0.0, 0.002 + shift / 100], "rss_bytes": [4e8, 5e8 + step * 1e4]}
            line = {
                "step": step,
                "elapsed_s": step * (0.05 + shift),
                "values": {"loss": loss},
                "samples_per_s": 600 - 300 * shift + 40 * math.sin(step / 90),
                "waiting_share": 0.1 + shift / 4 + 0.02 * math.cos(step / 40),
                "ranks": ranks,
            }
            file.write(json.dumps(line) + "\n")
    start = {"world_size": 2, "backend": "native", "config": {"lr": lr, "layers": 4}}
    (folder / "config.json").write_text(json.dumps({"starts": [start]}))


def open_page(browser: Any, runs: Path) -> None:
    """Makes the page, and opens it as a file."""
    assert main(["view", str(runs)]) == 0
    browser.get_log("browser")  # what earlier pages said
    browser.get((runs / "view.html").as_uri())


def errors(browser: Any) -> list[str]:
    """What the console says, but for advice about `pixels` below."""
    told = [entry["message"] for entry in browser.get_log("browser")]
    return [message for message in told if "readback operations using getImageData" not in message]


def pixels(browser: Any, chart: int, run: int) -> int:
    """How many pixels of a chart have the colour of a run."""
    count = browser.execute_script(
        """
        const [chart, run] = arguments;
        const canvas = document.querySelectorAll(".chart canvas")[chart];
        const swatch = document.querySelector(`.bar [data-run="${run}"] + svg line`);
        const [r, g, b] = getComputedStyle(swatch).stroke.match(/\\d+/g).map(Number);
        const found = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 0; i < found.length; i += 4) {
          const away = [r, g, b].map((level, j) => Math.abs(found[i + j] - level));
          count += found[i + 3] > 200 && Math.max(...away) < 5;
        }
        return count;
        """,
        chart,
        run,
    )
    return int(count)


def settle(browser: Any) -> None:
    """Waits until what was asked for is drawn: two frames."""
    browser.execute_async_script(
        "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done));"
    )


@pytest.fixture
def page(browser: Any, runs: Path) -> Any:
    """Two runs, opened."""
    write_run(runs / "small", 0.1, 0.1)
    write_run(runs / "large", 0.5, 0.3)
    open_page(browser, runs)
    settle(browser)
    return browser


def element(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def test_the_curves_of_all_runs_are_drawn(page: Any) -> None:
    titles = [each.text for each in page.find_elements("css selector", ".chart h3")]
    assert titles[0] == "loss"
    assert "Throughput of all ranks samples/s" in titles
    assert "Waiting for averages, mean of the ranks % of the step" in titles
    for chart in range(3):
        assert pixels(page, chart, 0) > 100
        assert pixels(page, chart, 1) > 100
    assert errors(page) == []


def test_the_legend_hides_a_run_and_shows_it_again(page: Any) -> None:
    box = element(page, '[data-run="0"]')
    box.click()
    settle(page)
    assert pixels(page, 0, 0) == 0
    assert pixels(page, 0, 1) > 100
    box.send_keys(" ")  # by the keyboard
    settle(page)
    assert pixels(page, 0, 0) > 100
    element(page, "#none").click()
    settle(page)
    assert pixels(page, 0, 1) == 0
    element(page, "#all").click()
    settle(page)
    assert pixels(page, 0, 1) > 100
    assert errors(page) == []


def test_the_configurations_that_differ_are_told(page: Any) -> None:
    shown = [
        each.text
        for each in page.find_elements("css selector", "#config tbody tr")
        if each.is_displayed()
    ]
    assert shown == ["config.lr 0.3 0.1"]
    element(page, "#alike").click()
    rows = page.find_elements("css selector", "#config tbody tr")
    assert all(each.is_displayed() for each in rows)
    assert len(rows) == 4
    assert "1 of 4 settings differ" in element(page, "#settings + .hint").text


def test_the_summary_names_the_slowest_rank_and_what_is_not_finite(page: Any) -> None:
    rows = [each.text for each in page.find_elements("css selector", "#summary + .wide tbody tr")]
    assert "rank 1: 7 ms behind, slowest in 100% of the steps" in rows[0]
    assert "loss is NaN or infinite in 1 step, first in 500" in rows[1]


def range_of(browser: Any) -> list[str]:
    return [element(browser, f"#{name}").get_property("value") for name in ("from", "to")]


def test_zooming_by_numbers_by_keys_and_by_the_mouse(page: Any) -> None:
    element(page, "#from").send_keys("1000")
    element(page, "#to").send_keys("2000\t")
    assert range_of(page) == ["1000", "2000"]
    plot = element(page, ".plot")
    plot.send_keys("+")
    assert range_of(page) == ["1250", "1750"]
    plot.send_keys("0")
    assert range_of(page) == ["", ""]

    from selenium.webdriver import ActionChains

    over = element(page, ".u-over")
    width = over.size["width"]
    mouse = ActionChains(page).move_to_element_with_offset(over, -width // 4, 0)
    mouse.click_and_hold().move_by_offset(width // 2, 5).release().perform()
    low, high = map(float, range_of(page))
    assert 600 < low < 900
    assert 2100 < high < 2400
    element(page, "#reset").click()
    assert range_of(page) == ["", ""]
    assert errors(page) == []


def test_keys_move_the_cursor_and_its_values_are_told(page: Any) -> None:
    plot = element(page, ".plot")
    plot.send_keys("\ue014" * 3)  # arrow right
    settle(page)
    said = element(page, ".readout").text
    assert said.startswith("step ")
    assert "large" in said
    assert "small" in said
    assert "—" not in said
    assert errors(page) == []


def test_curves_over_time(page: Any) -> None:
    element(page, '[value="seconds"]').click()
    settle(page)
    assert pixels(page, 0, 0) > 100
    plot = element(page, ".plot")
    plot.send_keys("\ue014")
    settle(page)
    # The longer of the runs takes 1650 s.
    assert element(page, ".readout").text.startswith("time (min) ")
    assert errors(page) == []


def test_a_hostile_name_and_runs_without_steps(browser: Any, runs: Path) -> None:
    write_run(runs / "<img src=x onerror=alert(1)>", 0.1, 0.1, steps=1)
    write_run(runs / "empty", 0.1, 0.1, steps=0)
    open_page(browser, runs)
    settle(browser)
    assert "<img src=x onerror=alert(1)>" in element(browser, "#bar").text
    assert browser.find_elements("css selector", "img") == []
    assert errors(browser) == []


def test_only_empty_runs(browser: Any, runs: Path) -> None:
    write_run(runs / "a", 0.1, 0.1, steps=0)
    open_page(browser, runs)
    assert "No steps have been written yet" in element(browser, "#charts").text
    assert errors(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_follows_the_colours_of_the_reader(browser: Any, runs: Path, scheme: str) -> None:
    write_run(runs / "a", 0.1, 0.1)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    try:
        open_page(browser, runs)
        settle(browser)
        ground = element(browser, "body").value_of_css_property("background-color")
        levels = [int(part) for part in ground[ground.index("(") + 1 : -1].split(",")[:3]]
        assert (sum(levels) > 600) == (scheme == "light")
        assert pixels(browser, 0, 0) > 100
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
