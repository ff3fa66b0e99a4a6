"""Fitting costs: known ones are found again from noisy times; what data can't tell is refused."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_exchange_time import TYPICAL
from training import TIME_LIMIT

from pydist.errors import InvalidUsage
from pydist.planning.cost_fit import MOST_DOUBT, Measurement, fit, fit_what_shows
from pydist.planning.costs import (
    DEFAULT_RATES,
    LINK_BETA,
    NAMES,
    Costs,
    FittedCosts,
    HostCosts,
    LinkCosts,
    default_costs,
    ethernet_beta,
)
from pydist.planning.exchange_time import Collective

pytestmark = TIME_LIMIT

SIZES = [8, 1024, 16 << 10, 256 << 10, 4 << 20, 64 << 20]
SHAPES = [(2, 1), (4, 1), (8, 1)]
THREE = ("link.alpha_s", LINK_BETA, "link.gamma_s_per_byte")
HOST_THREE = ("host.alpha_s", "host.beta_s_per_byte", "host.gamma_s_per_byte")
# Messages cost nothing but their delay.
PLAIN = replace(TYPICAL, link=replace(TYPICAL.link, message_s=0.0, rank_s_per_byte=0.0))


def timed(
    costs: Costs,
    shapes: list[tuple[int, int]],
    sizes: list[int],
    *,
    noise: float = 0.0,
    collectives: tuple[Collective, ...] = ("all_reduce",),
    way: str = "auto",
    seed: int = 0,
) -> list[Measurement]:
    """What a cluster of such costs would measure, off by a few percent at random."""
    luck = random.Random(seed)
    asked = [
        Measurement(hosts, ranks, size, 1.0, collective=collective, way=way)
        for collective in collectives
        for hosts, ranks in shapes
        for size in sizes
    ]
    return [replace(m, seconds=m.predicted_s(costs) * luck.gauss(1, noise)) for m in asked]


@given(st.floats(10e-6, 1e-3), st.floats(1e-9, 20e-9), st.floats(6, 20), st.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_known_costs_are_found_again(
    alpha: float, beta: float, gamma_over_beta: float, seed: int
) -> None:
    """An all-reduce shows gamma where adding up takes longer than the link, an all-gather beta."""
    link = replace(
        PLAIN.link, alpha_s=alpha, beta_s_per_byte=beta, gamma_s_per_byte=gamma_over_beta * beta
    )
    costs = replace(PLAIN, link=link)
    both: tuple[Collective, ...] = ("all_reduce", "all_gather")
    found = fit(timed(costs, SHAPES, SIZES, noise=0.03, collectives=both, seed=seed), PLAIN, THREE)
    for name, doubt in zip(THREE, found.doubt, strict=True):
        assert found.costs.value(name) == pytest.approx(costs.value(name), rel=0.1)
        assert doubt < 0.1
    held_out = timed(costs, [(3, 1), (6, 1)], [64, 64 << 10, 16 << 20], collectives=both)
    assert max(abs(m.error(found.costs)) for m in held_out) < 0.15


def test_numbers_of_hosts_tell_messages_from_delays() -> None:
    names = ("link.alpha_s", "link.message_s", LINK_BETA)
    known = replace(TYPICAL, link=LinkCosts(1e-6, 1e-9, 0.1e-9, 1e-6, 0.3e-9))
    found = fit(timed(TYPICAL, SHAPES, SIZES, noise=0.03), known, names)
    for name in names:
        assert found.costs.value(name) == pytest.approx(TYPICAL.value(name), rel=0.15)
    assert found.costs.host == known.host


def test_costs_within_a_host() -> None:
    known = replace(TYPICAL, host=HostCosts(1e-6, 1e-9, 1e-9))
    collectives: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    measured = timed(TYPICAL, [(1, 2), (1, 4)], SIZES, noise=0.03, collectives=collectives)
    found = fit(measured, known, HOST_THREE)
    for name in HOST_THREE:
        assert found.costs.value(name) == pytest.approx(TYPICAL.value(name), rel=0.15)


def test_ranks_that_share_cores_are_slower_by_as_much() -> None:
    alone = Measurement(2, 4, 1 << 20, 1.0)
    crowded = replace(alone, ranks_per_core=4.0)
    slow = replace(PLAIN, link=replace(PLAIN.link, beta_s_per_byte=0.0))
    assert crowded.predicted_s(slow) == pytest.approx(4 * alone.predicted_s(slow))
    link_only = default_costs(1.0)
    for name in NAMES:
        if name != LINK_BETA:
            link_only = link_only.with_value(name, 0.0)
    assert crowded.predicted_s(link_only) == alone.predicted_s(link_only)


@pytest.mark.parametrize("way", ["auto", "inline", "one shot", "direct exchange", "ring"])
def test_what_a_token_bucket_lets_pass_costs_no_time_on_the_link(way: str) -> None:
    link_only = default_costs(1.0)
    for name in NAMES:
        if name != LINK_BETA:
            link_only = link_only.with_value(name, 0.0)
    for size in (1 << 10, 1 << 20):
        shaped = Measurement(4, 1, size, 1.0, way=way)
        without_s = shaped.predicted_s(link_only)
        burst = replace(shaped, burst_bytes=8 << 10)
        saved_s = min(without_s, (8 << 10) * link_only.value(LINK_BETA))
        assert burst.predicted_s(link_only) == pytest.approx(without_s - saved_s)


@pytest.mark.parametrize(
    ("shapes", "sizes", "way", "names", "message"),
    [
        # A ring adds up as many bytes as it sends, in any case, and adding up takes less.
        (SHAPES, SIZES, "ring", THREE, "hardly show link.gamma_s_per_byte"),
        # As many messages as delays, which are longer.
        (
            [(2, 1)],
            SIZES,
            "auto",
            ("link.alpha_s", "link.message_s", LINK_BETA),
            "hardly show link.message_s",
        ),
        (SHAPES, [64 << 20], "auto", ("link.alpha_s", LINK_BETA), "hardly show link.alpha_s"),
        (SHAPES, SIZES, "auto", ("host.alpha_s",), "hardly show host.alpha_s"),
        # The slow link hides what the processor does meanwhile.
        (SHAPES, SIZES, "auto", ("link.rank_s_per_byte",), "hardly show link.rank_s_per_byte"),
    ],
)
def test_what_data_cannot_tell_is_refused(
    shapes: list[tuple[int, int]], sizes: list[int], way: str, names: tuple[str, ...], message: str
) -> None:
    costs = TYPICAL.at_rate(1.0)
    measured = timed(costs, shapes, sizes, noise=0.03, way=way)
    with pytest.raises(InvalidUsage, match=re.escape(message)) as caught:
        fit(measured, costs, names)
    assert "shows at" in str(caught.value)
    assert f"off by {MOST_DOUBT:.0%}" not in str(caught.value)


def test_numbers_that_count_for_as_much_are_not_told_apart() -> None:
    costs = TYPICAL.at_rate(1.0)
    costs = costs.with_value("link.gamma_s_per_byte", costs.value(LINK_BETA))
    measured = timed(costs, SHAPES, SIZES, noise=0.03, way="ring")
    message = "can't tell link.beta_s_per_byte from link.gamma_s_per_byte"
    with pytest.raises(InvalidUsage, match=message):
        fit(measured, costs, THREE)


def test_what_shows_is_fitted() -> None:
    costs = TYPICAL.at_rate(1.0)
    measured = timed(costs, SHAPES, SIZES, noise=0.03)
    names = (LINK_BETA, "link.alpha_s", "link.rank_s_per_byte", "link.message_s")
    found, refused = fit_what_shows(measured, default_costs(1.0), names)
    assert found.fitted == (LINK_BETA, "link.alpha_s", "link.message_s")
    assert len(refused) == 1
    assert refused[0].startswith(
        "link.rank_s_per_byte stays at 3e-10 s: the 18 measurements hardly"
    )
    again, _ = fit_what_shows(measured, default_costs(1.0), names[::-1])
    assert set(again.fitted) == set(found.fitted)
    with pytest.raises(InvalidUsage, match=r"hardly show link\.rank_s_per_byte"):
        fit_what_shows(measured, default_costs(1.0), ["link.rank_s_per_byte"])


def test_too_few_measurements_are_refused() -> None:
    measured = timed(TYPICAL, [(2, 1)], [8, 1024, 1 << 20])
    with pytest.raises(InvalidUsage, match="3 measurements can't tell 3 numbers"):
        fit(measured, TYPICAL, THREE)
    with pytest.raises(InvalidUsage, match=r"the model has no link\.delta_s; it has link\.alpha_s"):
        fit(measured, TYPICAL, ["link.delta_s"])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hosts": 1}, "a measurement has two ranks at least"),
        ({"seconds": 0.0}, "a time above 0"),
        ({"size_bytes": 0}, "a byte"),
        ({"collective": "broadcast"}, "the model has no 'broadcast'; it has all_reduce"),
        ({"way": "tree"}, "the model has no way 'tree' of all_reduce"),
        ({"way": "ring", "collective": "all_gather"}, "no way 'ring' of all_gather"),
    ],
)
def test_impossible_measurements(values: dict[str, Any], message: str) -> None:
    possible: dict[str, Any] = {"hosts": 2, "ranks_per_host": 1, "size_bytes": 8, "seconds": 1.0}
    Measurement(**possible)
    with pytest.raises(InvalidUsage, match=message):
        Measurement(**possible | values)


# ---- tables and files ---------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1.0, *DEFAULT_RATES, 800.0])
def test_defaults(rate: float) -> None:
    costs = default_costs(rate)
    # 1448 bytes of 1538 on the line.
    assert 8e-9 / costs.link.beta_s_per_byte == pytest.approx(rate * 0.9415, rel=1e-3)
    assert all(costs.value(name) > 0 for name in NAMES)
    assert costs.link.alpha_s >= default_costs(400.0).link.alpha_s


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_no_link_has_such_a_rate(rate: float) -> None:
    with pytest.raises(InvalidUsage, match="give a number above 0, such as 25"):
        ethernet_beta(rate)


def test_a_file_keeps_a_fit(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    kept = FittedCosts(TYPICAL, THREE, 8, 0.12, "two hosts")
    path.write_text(kept.as_json())
    assert FittedCosts.read(path) == kept


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "other"}, "bench/hosts/fit_model.py"),
        ({"fitted": ["link.gamma"]}, "'fitted' is"),
        ({"costs": 3}, "'link' must hold alpha_s, beta_s_per_byte"),
        ({"costs": {"link": {"alpha_s": 1}}}, "it holds ['alpha_s']"),
        ({"ranks": "many"}, "'ranks' is 'many'"),
        ({"held_out_error": "none"}, "'held_out_error' is 'none'"),
    ],
)
def test_files_that_keep_no_fit(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    saved = json.loads(FittedCosts(TYPICAL, THREE, 8, None, "").as_json())
    path.write_text(json.dumps({**saved, **change}))
    with pytest.raises(InvalidUsage, match=re.escape(message)):
        FittedCosts.read(path)


def test_a_cost_that_is_no_time(tmp_path: Path) -> None:
    path = tmp_path / "fit.json"
    saved = json.loads(FittedCosts(TYPICAL, THREE, 8, None, "").as_json())
    for value in (-1.0, "fast", None, True):
        saved["costs"]["host"]["alpha_s"] = value
        path.write_text(json.dumps(saved))
        with pytest.raises(InvalidUsage, match=r"host\.alpha_s is .*; it must be a number of sec"):
            FittedCosts.read(path)
    path.write_text("{")
    with pytest.raises(InvalidUsage, match="is no JSON"):
        FittedCosts.read(path)
    with pytest.raises(InvalidUsage, match="can't be read: No such file"):
        FittedCosts.read(tmp_path / "nowhere")
