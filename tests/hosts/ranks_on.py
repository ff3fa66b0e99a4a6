"""Runs a function of a test module on ranks that live on several hosts.

    from namespaces import Hosts
    from ranks_on import RanksOn, run_ranks_on

    def number():                       # at the top level of the test module: sent by name
        pydist.init()
        return pydist.rank()

    def test_numbers():
        with Hosts(2) as hosts:
            assert run_ranks_on(hosts, [2, 1], number) == [0, 1, 2]

`RanksOn` and the functions are those of launch.py, limits and errors included; the ranks are forked
off the same server. The store is served by the test process, on the first host's address.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from launch import DEFAULT_TIMEOUT_S, Ranks
from namespaces import Hosts
from network_namespace import inside
from rank_places import place_ranks
from rank_process import Outcome
from time_limit import PATIENCE
from torch.distributed import TCPStore  # type: ignore[attr-defined]


class RanksOn(Ranks):
    """Rank processes on several hosts that live for several calls: see launch.py.

    Args:
        hosts: where they live.
        ranks_per_host: the number of ranks on each host; rank 0 is on the first.
        env: set in each rank; None removes a variable.
    """

    def __init__(
        self,
        hosts: Hosts,
        ranks_per_host: Sequence[int],
        env: Mapping[str, str | None] | None = None,
    ) -> None:
        self._places = place_ranks(hosts, ranks_per_host)
        self._first = hosts[0]
        super().__init__(len(self._places), env)

    def _rank_environment(self, rank: int, env: Mapping[str, str | None] | None) -> dict[str, str]:
        return super()._rank_environment(rank, {**self._places[rank].variables, **(env or {})})

    def _namespace(self, rank: int) -> Path:
        return self._places[rank].host.namespace

    def _serve_store(self) -> TCPStore:
        # The server, its client in this process and the threads of both stay on that host.
        with inside(self._first.namespace):
            listener = socket.create_server((self._first.address, 0))
            return TCPStore(
                self._first.address,
                listener.getsockname()[1],
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=DEFAULT_TIMEOUT_S * PATIENCE),
                master_listen_fd=listener.detach(),
            )


def run_ranks_on(
    hosts: Hosts,
    ranks_per_host: Sequence[int],
    function: Callable[..., Any],
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str | None] | None = None,
) -> list[Any]:
    """Calls `function(*args)` on fresh ranks; returns the values in rank order."""
    with RanksOn(hosts, ranks_per_host, env) as ranks:
        return ranks.run(function, *args, timeout=timeout)


def rank_outcomes_on(
    hosts: Hosts,
    ranks_per_host: Sequence[int],
    function: Callable[..., Any],
    *args: Any,
    timeout: float = DEFAULT_TIMEOUT_S,
    env: Mapping[str, str | None] | None = None,
) -> list[Outcome]:
    """Calls `function(*args)` on fresh ranks; returns how it ended on each."""
    with RanksOn(hosts, ranks_per_host, env) as ranks:
        return ranks.outcomes(function, *args, timeout=timeout)
