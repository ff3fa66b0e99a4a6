"""What is left of a job when a host is lost: the others go on, unless that host had the store.

Rank 0 is on the first host, ranks 1 and 2 are on the second, rank 3 is on the third.
"""

import os
import re
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hosts_or_skip import hosts_or_skip
from launch import run_ranks
from namespaces import Hosts
from ranks_on import rank_outcomes_on
from surviving_training import LIMIT_S, train
from survivors_of import die, survivors_of
from time_limit import PATIENCE

import pydist
from pydist.job import processes

pytestmark = pytest.mark.timeout(120)

RANKS_PER_HOST = [1, 2, 1]
OF_FIRST, OF_SECOND = [0], [1, 2]
NATIVE = {"PYDIST_BACKEND": "native"}
# How long the survivors wait for those of whom they can't see that they have died.
SETTLE_S = 2.0


@pytest.fixture
def three_hosts() -> Iterator[Hosts]:
    with hosts_or_skip(3) as hosts:
        yield hosts


def see_own_host_alone() -> None:
    """Real hosts don't see each other's processes; these would, and could tell who has died."""
    machine, space = processes._machine(), os.stat("/proc/self/ns/net").st_ino
    processes._machine = lambda: f"{machine} {space}"  # type: ignore[assignment]


class Cut:
    """Cuts a host off, silently, when all of its ranks have asked for that; for a `with`."""

    def __init__(self, hosts: Hosts, host: int, folder: Path) -> None:
        self._host, self._folder = hosts[host], folder
        self._asking = RANKS_PER_HOST[host]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve)

    def _serve(self) -> None:
        while not self._is_over.wait(0.01):
            if len(list(self._folder.glob("asks-*"))) == self._asking:
                self._host.cut(silently=True)
                (self._folder / "is-cut").touch()
                return

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()


def be_cut(folder: Path) -> None:
    """On the ranks of that host: asks, and waits until it is done."""
    (folder / f"asks-{os.getpid()}").touch()
    deadline_s = time.monotonic() + LIMIT_S
    while not (folder / "is-cut").exists():
        assert time.monotonic() < deadline_s, "nobody has cut this host off"
        time.sleep(0.01)


# --- a host without the store --------------------------------------------------------------------


def train_on_hosts(folder: str, sharded: bool, cut: str | None) -> Any:
    see_own_host_alone()
    fail = die if cut is None else partial(be_cut, Path(cut))
    size, values = train(folder, "native", sharded, OF_SECOND, fail, SETTLE_S)
    return pydist.backend(), size, values


@pytest.mark.parametrize(
    ("is_cut", "sharded"), [(False, True), pytest.param(True, False, marks=pytest.mark.thorough)]
)
def test_training_goes_on_without_a_host(
    three_hosts: Hosts, tmp_path: Path, is_cut: bool, sharded: bool
) -> None:
    """On the first host and the third, between which gradients go by the native backend again."""
    alone, together, signs = (tmp_path / name for name in ("alone", "together", "signs"))
    for folder in (alone, together, signs):
        folder.mkdir()
    [(_, expected)] = run_ranks(train, 1, str(alone), "native", sharded, timeout=LIMIT_S)
    with Cut(three_hosts, 1, signs):
        arguments = (str(together), sharded, str(signs) if is_cut else None)
        outcomes = rank_outcomes_on(
            three_hosts, RANKS_PER_HOST, train_on_hosts, *arguments, timeout=60, env=NATIVE
        )
    if is_cut:
        for rank in OF_SECOND:
            # They live, and can't reach the store: nothing but the others goes on.
            assert outcomes[rank].error == "TransportError", outcomes[rank].describe()
            assert "nothing has answered at the job's store" in outcomes[rank].message
        found = [outcomes[rank].value for rank in (0, 3)]
        assert None not in found, "\n".join(outcome.describe() for outcome in outcomes)
    else:
        found = survivors_of(outcomes, OF_SECOND)
    for backend, size, values in found:
        assert (backend, size) == ("native", 2)
        # Sums over ranks are rounded in another order.
        assert values == pytest.approx(expected, rel=1e-9)
    assert found[0] == found[1]


# --- the host that serves the store --------------------------------------------------------------


def reduce_for_ever() -> None:
    while True:
        pydist.all_reduce(torch.ones(3))


def lose_the_store(cut: str | None, port: str | None) -> Any:
    see_own_host_alone()
    if port is not None:
        os.environ["MASTER_PORT"] = port
    pydist.init(timeout=100)
    pydist.all_reduce(torch.ones(3))
    if pydist.rank() in OF_FIRST:
        if cut is None:
            die()
        be_cut(Path(cut))
        return None
    began_s = time.monotonic()
    with pytest.raises(pydist.PeerLost) as lost:
        reduce_for_ever()
    lost_s = time.monotonic()
    with pytest.raises(pydist.TransportError) as gone:
        pydist.reform()
    return lost.value.ranks, lost_s - began_s, str(gone.value), time.monotonic() - lost_s


@pytest.mark.parametrize(
    ("is_cut", "is_served_by_rank_0"),
    [
        (False, True),
        *(pytest.param(True, by_rank_0, marks=pytest.mark.thorough) for by_rank_0 in (True, False)),
    ],
)
def test_without_the_host_of_the_store_all_raise_and_say_so(
    three_hosts: Hosts, tmp_path: Path, is_cut: bool, is_served_by_rank_0: bool
) -> None:
    """Within ten seconds each (docs/network.md): who is lost, and then that nobody can go on."""
    env: dict[str, str | None] = dict(NATIVE)
    port = None
    if is_served_by_rank_0:
        env |= {"TORCHELASTIC_USE_AGENT_STORE": None, "TORCHELASTIC_RESTART_COUNT": None}
        port = str(three_hosts[0].free_port())
    cut = str(tmp_path) if is_cut else None
    with Cut(three_hosts, 0, tmp_path):
        outcomes = rank_outcomes_on(
            three_hosts, RANKS_PER_HOST, lose_the_store, cut, port, timeout=60, env=env
        )
    server = r"rank 0 \(pid \d+ on host .*\)" if is_served_by_rank_0 else "the launcher"
    said = rf"nothing has answered at the job's store, {re.escape(three_hosts[0].address)}:\d+, for"
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome.describe()
        ranks, losing_s, text, reforming_s = outcome.value
        assert ranks == (0,)
        assert losing_s < 10 + PATIENCE
        assert re.match(rf"{said} 10 s, .*: {server}, which serves it, has died, or its host", text)
        assert reforming_s < 10 + 3 * PATIENCE, text
