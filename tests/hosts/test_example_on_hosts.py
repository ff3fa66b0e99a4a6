"""The training example on two hosts: the same losses as with as many ranks of one host."""

from pathlib import Path

import pytest
from namespaces import Hosts
from test_launchers_on_hosts import PORT, PYDIST_RUN, TORCHRUN, start_on_each
from thorough import everyday
from tiny_gpt import EXAMPLES, TINY, losses_in, near, train_gpt

pytestmark = pytest.mark.timeout(180)

RANKS_PER_HOST = [2, 1]


@pytest.fixture(scope="module")
def on_one_host(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return train_gpt(tmp_path_factory.mktemp("gpt"), sum(RANKS_PER_HOST), backend="native")


@pytest.mark.parametrize("launcher", everyday(PYDIST_RUN, thorough=(TORCHRUN,)))
def test_it_trains_the_same(
    launcher: list[str], hosts: Hosts, on_one_host: list[float], tmp_path: Path
) -> None:
    """Gradients of other sums: a host's first, where one host adds up all in rank order."""
    place = ["--nnodes=2", f"--master-addr={hosts[0].address}", f"--master-port={PORT}"]
    script = [str(EXAMPLES / "train_gpt.py"), "--output", str(tmp_path), *TINY]
    commands = [
        [*launcher, *place, f"--node-rank={number}", f"--nproc-per-node={count}", *script]
        for number, count in enumerate(RANKS_PER_HOST)
    ]
    # Not gloo, which `auto` would take where hosts can't connect.
    start_on_each(hosts, commands, [{"PYDIST_BACKEND": "native"}] * 2)
    assert losses_in(tmp_path) == near(on_one_host, len(on_one_host))
    assert len(on_one_host) == 12
