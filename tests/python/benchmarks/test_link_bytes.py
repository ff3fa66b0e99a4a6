"""What a collective has to send between hosts, by the table in docs/network.md."""

import pytest

from pydist.benchmarks.collective_cases import COLLECTIVES, OUT_OF_PLACE, Case
from pydist.benchmarks.link_bytes import Sent, Settings, busiest_host, sent_between_hosts
from pydist.topology.placement import Placement

pytestmark = pytest.mark.timeout(20)

MIB = 1 << 20
ONE_EACH = Placement(list("ab"))
TWO_EACH = Placement(list("aabb"))
UNEVEN = Placement(list("aab"))
THREE_HOSTS = Placement(list("aabbcc"))


def case_of(name: str, size_bytes: int, placement: Placement, dtype: str = "uint8") -> Case:
    kind = COLLECTIVES[name]
    item = 1 if dtype == "uint8" else 4
    root = 0 if kind.has_root else -1
    return Case(name, dtype, "sum", root, size_bytes // item, placement.ranks, OUT_OF_PLACE)


def busiest(name: str, size_bytes: int, placement: Placement, settings: Settings) -> float:
    sent = sent_between_hosts(case_of(name, size_bytes, placement), placement, settings)
    return busiest_host(sent, placement)


@pytest.mark.parametrize(
    ("name", "placement", "size_bytes", "expected"),
    [
        # By hosts: 2(h-1)/h s a host, whatever the number of ranks.
        ("all_reduce", TWO_EACH, 12 * MIB, 12 * MIB),
        ("all_reduce", UNEVEN, 12 * MIB, 12 * MIB),
        ("all_reduce", THREE_HOSTS, 12 * MIB, 16 * MIB),
        # Exchange: 2(p-1)/p s a rank.
        ("all_reduce", ONE_EACH, 12 * MIB, 12 * MIB),
        ("reduce_scatter", ONE_EACH, 12 * MIB, 6 * MIB),
        # By hosts: what is for a host, or of it, once.
        ("reduce_scatter", TWO_EACH, 12 * MIB, 6 * MIB),
        ("all_gather", TWO_EACH, 12 * MIB, 6 * MIB),
        ("all_gather", UNEVEN, 12 * MIB, 8 * MIB),
        ("all_to_all", THREE_HOSTS, 12 * MIB, 16 * MIB),
        ("broadcast", TWO_EACH, 12 * MIB, 12 * MIB),
        ("reduce", THREE_HOSTS, 12 * MIB, 24 * MIB),
        ("gather", TWO_EACH, 12 * MIB, 6 * MIB),
        ("scatter", TWO_EACH, 12 * MIB, 6 * MIB),
        ("send_recv", THREE_HOSTS, 12 * MIB, 12 * MIB),
        ("barrier", TWO_EACH, 0, 0),
        # One shot: all of a rank's goes once to each other host.
        ("all_reduce", TWO_EACH, 1024, 2048),
        ("all_reduce", THREE_HOSTS, 1024, 4096),
        ("all_gather", TWO_EACH, 4096, 2048),
        ("broadcast", THREE_HOSTS, 1024, 2048),
    ],
)
def test_the_host_with_the_most_to_send(
    name: str, placement: Placement, size_bytes: int, expected: float
) -> None:
    assert busiest(name, size_bytes, placement, Settings()) == pytest.approx(expected)


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_host_sends_nothing(name: str) -> None:
    placement = Placement(list("aaa"))
    assert sent_between_hosts(case_of(name, 3 * MIB, placement), placement, Settings()) == []


def test_a_ring_sends_from_its_last_rank_on_each_host() -> None:
    sent = sent_between_hosts(
        case_of("all_reduce", 4 * MIB, TWO_EACH), TWO_EACH, Settings(is_ring=True)
    )
    assert sent == [Sent(1, 2, 6 * MIB), Sent(3, 0, 6 * MIB)]


def test_a_ring_is_for_some_collectives_alone() -> None:
    ring, usual = Settings(is_ring=True), Settings()
    case = case_of("broadcast", 4 * MIB, TWO_EACH)
    assert sent_between_hosts(case, TWO_EACH, ring) == sent_between_hosts(case, TWO_EACH, usual)


def test_one_shot_ends_where_the_engine_ends_it() -> None:
    """At 128 KiB / (p - 1) for sums, 64 KiB for the rest, and never beyond a chunk."""
    limit = (128 << 10) // 3
    assert busiest("all_reduce", limit, TWO_EACH, Settings()) == 2 * limit
    assert busiest("all_reduce", limit + 1, TWO_EACH, Settings()) == pytest.approx(limit + 1)
    assert busiest("broadcast", 64 << 10, TWO_EACH, Settings()) == 64 << 10
    # What rides in an announcement does so whatever a chunk is.
    assert busiest("all_reduce", 256, TWO_EACH, Settings(chunk_bytes=64)) == 512


def test_lanes_are_those_of_the_host_with_the_fewest_ranks() -> None:
    sent = sent_between_hosts(case_of("all_reduce", MIB, UNEVEN), UNEVEN, Settings())
    assert sorted(sent) == [Sent(0, 2, MIB), Sent(2, 0, MIB)]
    sent = sent_between_hosts(case_of("all_reduce", MIB, TWO_EACH), TWO_EACH, Settings())
    half = MIB / 2
    assert sorted(sent) == [Sent(0, 2, half), Sent(1, 3, half), Sent(2, 0, half), Sent(3, 1, half)]
