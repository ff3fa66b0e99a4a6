"""Which ranks are on which host, and which pairs of hosts are measured."""

from itertools import combinations

import pytest

import pydist
from pydist.topology.pairs import MOST_HOSTS_IN_PAIRS, plan_for
from pydist.topology.placement import Placement, leaders_of

pytestmark = pytest.mark.timeout(20)


def test_hosts_are_numbered_by_their_lowest_rank() -> None:
    placement = Placement(["b", "a", "b", "c", "a"])
    assert placement.host_of == [0, 1, 0, 2, 1]
    assert placement.ranks_on == [[0, 2], [1, 4], [3]]
    assert leaders_of(placement) == [0, 1, 3]
    assert (placement.ranks, placement.hosts, placement.least_on_a_host) == (5, 3, 1)


def test_ranks_of_another_host_are_dealt_out_to_those_of_one() -> None:
    placement = Placement(["a", "a", "a", "b", "b"])
    assert [placement.counterpart(rank, 1) for rank in (0, 1, 2)] == [3, 4, 3]
    assert [placement.counterpart(rank, 0) for rank in (3, 4)] == [0, 1]
    for rank, host in ((5, 0), (-1, 0), (0, 2), (0, -1)):
        with pytest.raises(pydist.InvalidUsage, match="not of 5 ranks on 2 hosts"):
            placement.counterpart(rank, host)


def test_one_host_has_no_link() -> None:
    assert plan_for(1).turns == ()


@pytest.mark.parametrize("hosts", range(2, MOST_HOSTS_IN_PAIRS + 1))
def test_few_hosts_are_measured_in_all_pairs_one_at_a_time(hosts: int) -> None:
    covers, turns = plan_for(hosts)
    assert covers == "all pairs"
    assert [pair for turn in turns for pair in turn] == list(combinations(range(hosts), 2))
    assert all(len(turn) == 1 for turn in turns)


@pytest.mark.parametrize("hosts", [7, 8, 64, 65])
def test_many_hosts_are_measured_in_a_ring_in_few_turns(hosts: int) -> None:
    covers, turns = plan_for(hosts)
    assert covers == "ring"
    assert len(turns) == 2 + hosts % 2
    for turn in turns:
        busy = [host for pair in turn for host in pair]
        assert len(busy) == len(set(busy))
    pairs = sorted(pair for turn in turns for pair in turn)
    assert pairs == sorted([(0, hosts - 1), *((host, host + 1) for host in range(hosts - 1))])
