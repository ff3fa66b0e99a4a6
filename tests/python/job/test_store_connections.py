"""Groups share one connection to the job's store, and learn from it who cannot join them.

torch's TCPStore looks up the name of whoever connects to it and answers no rank meanwhile, so where
the name server is silent each connection would hold up the whole job for 10 s.
"""

import contextlib
import os
import re
import resource
from collections.abc import Iterator

import psutil
import pytest
import torch
from launch import run_ranks

import pydist
from pydist.job.meeting.local_store import serve_local_store

LIMIT_S = 25.0


def connections_to_store() -> int:
    port = int(os.environ["MASTER_PORT"])
    return sum(
        bool(connection.raddr) and connection.raddr.port == port
        for connection in psutil.Process().net_connections("tcp")
    )


def make_groups() -> tuple[int, int, float]:
    pydist.init()
    before = connections_to_store()
    groups = [pydist.new_group([0, 1]) for _ in range(3)]
    after = connections_to_store()
    ones = torch.ones(3)
    for group in groups:
        pydist.all_reduce(ones, group=group)
    return before, after, float(ones[0])


@pytest.mark.parametrize("backend", ["native", "gloo"])
def test_groups_share_the_connection_to_the_store(backend: str) -> None:
    results = run_ranks(make_groups, 2, timeout=LIMIT_S, env={"PYDIST_BACKEND": backend})
    for before, after, total in results:
        assert before > 0
        assert after == before
        assert total == 8


def test_the_store_of_one_host_is_reached_from_it_alone_and_asks_no_name_server() -> None:
    store = serve_local_store()
    listening = [
        connection.laddr.ip
        for connection in psutil.Process().net_connections("tcp")
        if connection.laddr.port == store.port and connection.status == psutil.CONN_LISTEN
    ]
    # As an address of IPv4, which /etc/hosts has.
    assert listening == ["127.0.0.1"]


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    """This process can open nothing, also not under numbers that it has closed in between."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard)
    )
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


def join_where_one_lacks_descriptors() -> str:
    pydist.init()
    starved = no_descriptors_left() if pydist.rank() == 1 else contextlib.nullcontext()
    with pytest.raises(pydist.TransportError) as caught, starved:
        pydist.new_group([0, 1, 2])
    ones = torch.ones(3)
    pydist.all_reduce(ones)
    assert ones[0] == 3
    return str(caught.value)


def test_a_rank_that_cannot_join_a_group_is_named_by_all() -> None:
    env = {"PYDIST_BACKEND": "gloo"}
    messages = run_ranks(join_where_one_lacks_descriptors, 3, timeout=LIMIT_S, env=env)
    assert "gloo could not connect rank 1" in messages[1]
    for message in (messages[0], messages[2]):
        assert re.search(r"rank 1 \(pid \d+ on host .*\) could not join the group", message)
        assert messages[1] in message
