"""A pydist job over hosts, on the backend that it chooses by itself, beside one process alone."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch
from hosts_or_skip import hosts_or_skip
from launch import Ranks
from namespaces import Hosts
from ranks_on import RanksOn, rank_outcomes_on, run_ranks_on
from torch import Tensor

import pydist

pytestmark = pytest.mark.timeout(120)

RANKS_PER_HOST = [2, 1]
WORLD_SIZE = sum(RANKS_PER_HOST)
# Blocks for three ranks: less than a packet, one that packets don't divide, several segments.
COUNTS = [3, 3 * 1117, 3 * 200_000]
# Sums of three values in any order differ by a few roundings of the largest of them.
TOLERANCE = 4 * np.finfo(np.float64).eps


def values(rank: int, count: int) -> Tensor:
    """What a rank brings along: known to all, no two of them alike."""
    return torch.from_numpy(np.random.default_rng(100 * rank + count).uniform(-1, 1, count))


def of_all(count: int) -> Tensor:
    return torch.stack([values(rank, count) for rank in range(WORLD_SIZE)])


def in_one_process(kind: str, count: int) -> list[Tensor]:
    """What each rank must get."""
    everything = of_all(count)
    total = everything.sum(0)
    if kind == "all_reduce":
        return [total] * WORLD_SIZE
    if kind == "reduce_scatter":
        return list(total.chunk(WORLD_SIZE))
    if kind == "broadcast":
        return [everything[WORLD_SIZE - 1]] * WORLD_SIZE
    if kind == "all_gather":
        return [everything.flatten()] * WORLD_SIZE
    if kind == "all_to_all":
        blocks = everything.view(WORLD_SIZE, WORLD_SIZE, -1)
        return [blocks[:, rank].flatten() for rank in range(WORLD_SIZE)]
    assert kind == "send and recv"
    return [everything[rank - 1] for rank in range(WORLD_SIZE)]


def send_on(mine: Tensor) -> Tensor:
    """Each to the next; the first sends before it receives, so some wait for others."""
    rank, size = pydist.rank(), pydist.world_size()
    got = torch.empty_like(mine)
    sending = pydist.send(mine, (rank + 1) % size, async_op=True)
    pydist.recv(got, (rank - 1) % size)
    sending.wait()
    return got


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": pydist.all_reduce,
    "reduce_scatter": pydist.reduce_scatter,
    "broadcast": lambda mine: pydist.broadcast(mine, root=WORLD_SIZE - 1),
    "all_gather": pydist.all_gather,
    "all_to_all": pydist.all_to_all,
    "send and recv": send_on,
}


def call(kind: str, count: int) -> Any:
    pydist.init(timeout=30)
    mine = values(pydist.rank(), count)
    result = CALLS[kind](mine)
    return (mine if result is None else result).numpy()


def describe_job() -> tuple[str, int, str, int]:
    pydist.init(timeout=30)
    return pydist.backend(), pydist.rank(), os.environ["LOCAL_RANK"], pydist.world_size()


@pytest.fixture(scope="module")
def ranks(hosts: Hosts) -> Iterator[Ranks]:
    with RanksOn(hosts, RANKS_PER_HOST) as ranks:
        yield ranks


def test_ranks_of_two_hosts_join_one_job(ranks: Ranks) -> None:
    said = ranks.run(describe_job)
    assert {backend for backend, *_ in said} == {"native"}
    assert [each[1:] for each in said] == [(0, "0", 3), (1, "1", 3), (2, "0", 3)]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("kind", CALLS)
def test_each_rank_gets_what_one_process_computes(ranks: Ranks, kind: str, count: int) -> None:
    require_right(ranks, kind, count)


def own_connections() -> tuple[set[str], set[int]]:
    """This host's addresses of its connections to the other, and the ports it listens on."""
    pydist.init("native", timeout=30)
    pydist.all_reduce(torch.ones(100_000))
    sockets = psutil.Process().net_connections("tcp")
    ports = {each.laddr.port for each in sockets if each.status == psutil.CONN_LISTEN}
    # Both ends of such a connection show it; the store's has its port at one of them.
    meeting = int(os.environ["MASTER_PORT"])
    between = [
        each
        for each in sockets
        if each.status == psutil.CONN_ESTABLISHED
        and meeting not in (each.laddr.port, each.raddr.port)
    ]
    pydist.barrier()
    return {each.laddr.ip.removeprefix("::ffff:") for each in between}, ports


def test_the_interfaces_and_ports_named_are_taken(hosts: Hosts) -> None:
    env = {"PYDIST_INTERFACE": "eth0,eth1", "PYDIST_PORTS": "29610-29619"}
    for host, (addresses, ports) in enumerate(
        run_ranks_on(hosts, [1, 1], own_connections, env=env)
    ):
        assert addresses >= {link.address for link in hosts[host].links}
        assert ports & set(range(29610, 29620))


def test_an_interface_that_is_not_there_is_one_error_on_all(hosts: Hosts) -> None:
    env = {"PYDIST_INTERFACE": "eth7", "PYDIST_BACKEND": "native"}
    first, second = rank_outcomes_on(hosts, [1, 1], describe_job, env=env)
    assert first.error == second.error == "TransportError"
    assert "PYDIST_INTERFACE names 'eth7', but this host has no such interface" in first.message
    assert "It has: " in first.message
    assert "eth0" in first.message


def test_a_far_and_bad_network_changes_nothing() -> None:
    with (
        hosts_or_skip(2, delay_ms=1.0, loss=0.01) as hosts,
        RanksOn(hosts, RANKS_PER_HOST) as ranks,
    ):
        for kind in CALLS:
            require_right(ranks, kind, COUNTS[1])


def require_right(ranks: Ranks, kind: str, count: int) -> None:
    results = ranks.run(call, kind, count)
    off = TOLERANCE * WORLD_SIZE if kind in ("all_reduce", "reduce_scatter") else 0.0
    for result, expected in zip(results, in_one_process(kind, count), strict=True):
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, expected.numpy(), rtol=0, atol=off)
    if kind == "all_reduce":
        for result in results:
            np.testing.assert_array_equal(result, results[0])
