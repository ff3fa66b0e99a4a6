"""A group costs no connection to the job's store.

torch's TCPStore looks up the name of whoever connects to it and answers no rank meanwhile, so where
the name server is silent each connection would hold up the whole job for 10 s.
"""

import os

import psutil
import pytest
import torch
from launch import run_ranks

import pydist

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
