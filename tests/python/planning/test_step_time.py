"""Times of steps: by hand, beside a simulation of buckets on a link, and what must hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_exchange_time import COSTS, SHAPES, TYPICAL
from training import TIME_LIMIT

from pydist.planning.costs import Costs, HostCosts, LinkCosts
from pydist.planning.exchange_time import INLINE_BYTES, Shape, seconds
from pydist.planning.step_time import Compute, ReadyBucket, data_parallel_step, sharded_step

pytestmark = TIME_LIMIT

# Two hosts: an all-reduce of s bytes takes s seconds, and its halves half of it.
A_SECOND_PER_BYTE = Costs(LinkCosts(0.0, 1.0, 0.0), HostCosts(0.0, 0.0, 0.0))
PAIR = Shape(2, 1)
# Openings, closings and votes; and what announces the half of an exchange.
NOTE_S = seconds("all_reduce", A_SECOND_PER_BYTE, PAIR, INLINE_BYTES)
ANNOUNCED_S = 64.0


def test_all_but_the_last_bucket_hide() -> None:
    """Backward takes 10,000 s; buckets of 1000 bytes are there at 5000 s and at its end."""
    buckets = [ReadyBucket(1000, 0.5), ReadyBucket(1000, 1.0)]
    found = data_parallel_step(Compute(4000, 10_000, 500), buckets, A_SECOND_PER_BYTE, PAIR)
    assert found.exposed_s == pytest.approx(1000 + ANNOUNCED_S + NOTE_S)
    assert found.step_s == pytest.approx(14_500 + found.exposed_s)
    assert found.efficiency == pytest.approx(14_500 / found.step_s)
    assert found.communication_s == pytest.approx(2 * (1000 + ANNOUNCED_S) + 2 * NOTE_S)
    assert found.link_bytes == pytest.approx(2 * (1000 + 64) + 2 * NOTE_S)


def test_a_slow_link_makes_buckets_wait_for_each_other() -> None:
    buckets = [ReadyBucket(5000, 0.1), ReadyBucket(5000, 0.2), ReadyBucket(5000, 1.0)]
    found = data_parallel_step(Compute(0, 10_000), buckets, A_SECOND_PER_BYTE, PAIR)
    # The first one begins at 1000 s, and the link is never free again.
    ends_s = 1000 + 3 * (5000 + ANNOUNCED_S)
    assert found.exposed_s == pytest.approx(ends_s + NOTE_S - 10_000)


def test_the_opening_goes_before_the_first_bucket() -> None:
    found = data_parallel_step(Compute(0, 1), [ReadyBucket(1000, 0.001)], A_SECOND_PER_BYTE, PAIR)
    assert found.exposed_s == pytest.approx(NOTE_S + 1000 + ANNOUNCED_S + NOTE_S - 1)


def test_parameters_arrive_during_the_next_forward() -> None:
    """A step with two buckets of equal size, half of forward each; the optimizer's takes 200 s / 2.

    The bucket of the first layers is updated after 50 s and gathered in 1000 + announcement; the
    other one follows it on the link, and forward, which needs it after half of 6000 s, finds it.
    """
    buckets = [ReadyBucket(2000, 0.5), ReadyBucket(2000, 1.0)]
    found = sharded_step(Compute(6000, 100_000, 200), buckets, A_SECOND_PER_BYTE, PAIR)
    half_s = 1000 + ANNOUNCED_S
    in_backward = half_s + NOTE_S
    in_forward = 50 + half_s - 100
    assert found.exposed_s == pytest.approx(in_backward + NOTE_S + in_forward)
    assert found.computing_s == pytest.approx(106_100)
    assert found.communication_s == pytest.approx(4 * half_s + 3 * NOTE_S)


def test_forward_waits_where_it_needs_what_is_late() -> None:
    buckets = [ReadyBucket(20_000, 0.5), ReadyBucket(2000, 1.0)]
    found = sharded_step(Compute(6000, 100_000), buckets, A_SECOND_PER_BYTE, PAIR)
    first_s, second_s = 1000 + ANNOUNCED_S, 10_000 + ANNOUNCED_S
    in_forward = first_s + second_s - 3000
    in_backward = first_s + NOTE_S + NOTE_S
    assert found.exposed_s == pytest.approx(in_backward + in_forward)


def test_a_rank_alone_computes_only() -> None:
    for step in (data_parallel_step, sharded_step):
        found = step(Compute(1, 2, 3), [ReadyBucket(100, 1.0)], TYPICAL, Shape(1, 1))
        assert (found.step_s, found.exposed_s, found.efficiency, found.link_bytes) == (6, 0, 1, 0)


def test_nothing_to_train_sends_nothing_but_notes() -> None:
    for step, notes in ((data_parallel_step, 2), (sharded_step, 3)):
        found = step(Compute(1, 2, 3), [], TYPICAL, Shape(8, 1))
        note_s = seconds("all_reduce", TYPICAL, Shape(8, 1), INLINE_BYTES)
        assert found.communication_s == pytest.approx(notes * note_s)


TIMES = st.floats(0, 10)
COMPUTES = st.builds(Compute, TIMES, TIMES, TIMES)


@st.composite
def bucket_lists(draw: st.DrawFn) -> list[ReadyBucket]:
    sizes = draw(st.lists(st.integers(INLINE_BYTES + 1, 1 << 30), max_size=8))
    shares = sorted(draw(st.lists(st.floats(0.01, 1), min_size=len(sizes), max_size=len(sizes))))
    return [ReadyBucket(size, share) for size, share in zip(sizes, shares, strict=True)]


@given(COMPUTES, bucket_lists(), COSTS, SHAPES, st.floats(1, 10))
def test_bounds(
    compute: Compute, buckets: list[ReadyBucket], costs: Costs, shape: Shape, more: float
) -> None:
    larger = [ReadyBucket(bucket.size_bytes * more, bucket.ready_share) for bucket in buckets]
    for step in (data_parallel_step, sharded_step):
        found = step(compute, buckets, costs, shape)
        assert 0 <= found.efficiency <= 1
        # What is exposed is on its way, but for what is ready only then.
        slack_s = 1e-9 * (1 + found.step_s + found.communication_s)
        assert found.exposed_s <= found.communication_s + compute.optimizer_s + slack_s
        assert found.step_s <= step(compute, larger, costs, shape).step_s + slack_s


@given(COMPUTES, bucket_lists(), COSTS, SHAPES)
def test_hiding_never_costs(
    compute: Compute, buckets: list[ReadyBucket], costs: Costs, shape: Shape
) -> None:
    """Gradients that all come at the end of backward leave nothing to hide."""
    at_end = [ReadyBucket(bucket.size_bytes, 1.0) for bucket in buckets]
    found = data_parallel_step(compute, buckets, costs, shape)
    worst = data_parallel_step(compute, at_end, costs, shape)
    assert found.step_s <= worst.step_s * (1 + 1e-9)
