"""Ratios of times that took turns."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pydist
from pydist.benchmarks.noise import (
    Ratio,
    bootstrap_interval,
    is_noisy,
    percentile,
    ratio_of,
    spread_of,
    two_groups,
)

pytestmark = pytest.mark.timeout(20)


def test_percentiles_interpolate() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([1, 2], 0.25) == 1.25
    assert percentile([5], 0.99) == 5
    assert (percentile([1, 2, 3], 0), percentile([1, 2, 3], 1)) == (1, 3)


def test_a_drift_that_both_meet_cancels() -> None:
    drift = [1.0, 1.5, 9.0, 2.0, 1.1, 7.0]
    ratio = ratio_of([2 * d for d in drift], drift)
    assert ratio == Ratio(2.0, 2.0, 2.0)
    assert ratio.tells


def test_the_interval_holds_the_true_ratio() -> None:
    """Of 200 experiments about 95 % do; 180 is more than four standard deviations below that."""
    generator = random.Random(1)
    held = 0
    for _ in range(200):
        own = [generator.lognormvariate(0, 0.2) for _ in range(25)]
        peer = [1.3 * generator.lognormvariate(0, 0.2) for _ in range(25)]
        ratio = ratio_of(peer, own)
        held += ratio.low <= 1.3 <= ratio.high
    assert held >= 175


def test_what_holds_one_tells_nothing() -> None:
    assert not Ratio(1.2, 0.9, 1.4).tells
    assert Ratio(0.8, 0.7, 0.95).tells
    assert str(Ratio(1.234, 1.1, 1.4)) == "1.23 (1.10 to 1.40)"
    assert str(Ratio(43.21, 40.04, 51)) == "43.2 (40.0 to 51.0)"
    assert str(Ratio(1234.5, 1000, 2000)) == "1234 (1000 to 2000)"


def test_series_of_different_lengths_are_refused() -> None:
    with pytest.raises(pydist.InvalidUsage, match="have 2 and 1"):
        ratio_of([1, 2], [1])
    with pytest.raises(pydist.InvalidUsage, match="0 and 0"):
        ratio_of([], [])


def test_the_bootstrap_repeats_itself() -> None:
    values = [1.0, 4.0, 2.0, 8.0, 3.0]
    first, second = (
        bootstrap_interval(5, lambda rounds: sum(values[i] for i in rounds)) for _ in range(2)
    )
    assert first == second
    assert first[0] < sum(values) < first[1]


def test_noise_is_told_by_the_quartiles() -> None:
    calm = [1.0, 1.01, 0.99, 1.02, 0.98, 50.0]  # one bad round does not make a bad machine
    assert not is_noisy(calm)
    assert is_noisy([1.0, 2.0, 1.2, 1.9, 0.8])
    assert spread_of([2.0] * 5) == 0


def test_two_states_are_told_from_one() -> None:
    fast, slow = [1.0, 1.02, 0.98, 1.01] * 5, [2.1, 2.0, 2.05] * 4
    groups = two_groups([*fast, *slow])
    assert groups is not None
    assert groups.low == pytest.approx(1.005)
    assert groups.high == pytest.approx(2.05)
    assert groups.share_low == pytest.approx(20 / 32)
    assert two_groups(fast) is None
    assert two_groups([*fast, 5.0, 6.0]) is None  # some bad rounds are no state
    assert two_groups([1.0 + 0.05 * i for i in range(40)]) is None  # a drift
    assert two_groups([*fast, *(1.2 * each for each in fast)]) is None  # too near
    assert two_groups([1.0, 1.0, 3.0, 3.0]) is None  # too few
    assert two_groups([]) is None


@given(st.lists(st.floats(1e-7, 1.0), max_size=40))
def test_groups_are_of_the_times(times: list[float]) -> None:
    groups = two_groups(times)
    if groups is not None:
        assert min(times) <= groups.low < groups.high <= max(times)
        assert 0.1 <= groups.share_low <= 0.9
