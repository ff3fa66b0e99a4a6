"""How long a job waits, who says so, and that nothing waits for ever."""

import pickle
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import clean_environment, free_port, rank_outcomes, run_command, run_ranks
from thorough import everyday
from time_limit import PATIENCE
from torch import nn

import pydist


def timeout_given_to_torch() -> list[float]:
    dist.init_process_group("pydist", timeout=timedelta(seconds=77))
    pydist.init()
    communicator = pydist.job.groups.communicator_of()
    given = communicator.timeout
    dist.destroy_process_group()
    dist.init_process_group("pydist", store=dist.HashStore(), rank=0, world_size=1)
    ours = pydist.job.groups.communicator_of(dist.group.WORLD).timeout
    dist.destroy_process_group()
    return [given, ours]


def test_timeouts_come_from_whoever_gave_one() -> None:
    assert run_ranks(timeout_given_to_torch, 1, env={"PYDIST_TIMEOUT": "123"}) == [[77.0, 123.0]]


def timeouts_of_groups_on_gloo() -> list[float]:
    seen = []
    # Half an hour is torch's own for gloo, whoever gave it.
    for given in (timedelta(hours=2), timedelta(minutes=30), None):
        dist.init_process_group("gloo", timeout=given)
        pydist.init()
        world = pydist.job.groups.communicator_of()
        model = pydist.DataParallel(torch.nn.Linear(1, 1))
        group = dist.new_group([0], timeout=timedelta(seconds=77))
        seen += [world.timeout, model._communicator.timeout]
        seen.append(pydist.job.groups.communicator_of(group).timeout)
        pydist.shutdown()
        dist.destroy_process_group()
    dist.init_process_group("gloo", timeout=timedelta(hours=2))
    pydist.init(timeout=45)
    return [*seen, pydist.job.groups.communicator_of().timeout]


def test_a_group_on_gloo_keeps_the_timeout_that_its_script_gave() -> None:
    told = run_ranks(timeouts_of_groups_on_gloo, 1, env={"PYDIST_TIMEOUT": "123"})
    assert told == [[7200.0, 7200.0, 77.0, 123.0, 123.0, 77.0, 123.0, 123.0, 77.0, 45.0]]


def thirty_minutes() -> list[float]:
    half_an_hour = timedelta(minutes=30)
    seen = []

    def timeout_of(group: Any = None) -> float:
        return float(pydist.job.groups.communicator_of(group).timeout)

    pydist.init(timeout=1800)
    seen.append(timeout_of())
    seen.append(timeout_of(dist.new_group([0], timeout=half_an_hour)))
    seen.append(timeout_of(dist.new_group([0])))
    pydist.shutdown()
    for kept in (1800, half_an_hour, 45.5):
        options = pydist.job.backends.Options(timeout=kept)
        dist.init_process_group("pydist", pg_options=options)
        seen.append(timeout_of(dist.group.WORLD))
        dist.destroy_process_group()
    dist.init_process_group("pydist", timeout=half_an_hour)
    pydist.init()
    seen.append(timeout_of())
    pydist.shutdown()
    dist.destroy_process_group()
    # What frameworks pass where their user gives none.
    dist.init_process_group("pydist", timeout=dist.constants.default_pg_timeout)
    seen.append(timeout_of(dist.group.WORLD))
    dist.destroy_process_group()
    return seen


def test_thirty_minutes_that_somebody_asked_for_stay() -> None:
    nobody = 600.0
    expected = [1800.0, 1800.0, nobody, 1800.0, 1800.0, 45.5, 1800.0, nobody]
    assert run_ranks(thirty_minutes, 1) == [expected]


def timeouts_beside_gloo() -> list[float]:
    seen = []
    for given in (None, timedelta(minutes=30), timedelta(seconds=45)):
        dist.init_process_group("gloo", timeout=given)
        seen.append(pydist.DataParallel(nn.Linear(2, 2))._communicator.timeout)
        pydist.shutdown()
        dist.destroy_process_group()
    return seen


def test_the_timeout_of_a_group_on_gloo_is_kept_as_in_torch() -> None:
    assert run_ranks(timeouts_beside_gloo, 1) == [[1800.0, 1800.0, 45.0]]
    env = {"PYDIST_TIMEOUT": "77"}
    assert run_ranks(timeouts_beside_gloo, 1, env=env) == [[77.0, 77.0, 45.0]]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_bad_timeout_in_options_is_refused(timeout: float) -> None:
    options = pydist.job.backends.Options(timeout=timeout)
    with pytest.raises(pydist.InvalidUsage, match="timeout="):
        dist.init_process_group(
            "pydist", store=dist.HashStore(), rank=0, world_size=1, pg_options=options
        )
    assert not dist.is_initialized()


def init_with_other_timeouts() -> float:
    pydist.init(timeout=45)
    pydist.init()
    pydist.init(timeout=45.0)
    pydist.init(timeout=timedelta(seconds=45))
    with pytest.raises(pydist.InvalidUsage, match="time-out of 45 s already, so timeout=60"):
        pydist.init(timeout=60)
    assert pydist.job.groups.communicator_of().timeout == 45.0
    pydist.shutdown()
    pydist.init(timeout=60)
    return float(pydist.job.groups.communicator_of().timeout)


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_a_second_init_cannot_change_the_timeout(backend: str) -> None:
    env = {"PYDIST_BACKEND": backend}
    assert run_ranks(init_with_other_timeouts, 2, env=env) == [60.0, 60.0]


def init_beside_a_group(backend: str) -> float:
    dist.init_process_group(backend, timeout=timedelta(seconds=50))
    if backend == "pydist":
        with pytest.raises(
            pydist.InvalidUsage,
            match=r"default group .* time-out of 50 s already, so timeout=70 .*init_process_group",
        ):
            pydist.init(timeout=70)
        assert not pydist.is_initialized()
        pydist.init(timeout=50)
    else:
        pydist.init(timeout=70)
    return float(pydist.job.groups.communicator_of().timeout)


def test_the_timeout_of_a_group_that_the_script_has_made() -> None:
    assert run_ranks(init_beside_a_group, 2, "pydist") == [50.0, 50.0]
    # Of another backend's group, pydist's operations have their own.
    assert run_ranks(init_beside_a_group, 2, "gloo") == [70.0, 70.0]


def test_a_timeout_says_timed_out() -> None:
    assert str(pydist.Timeout("nobody came")) == "timed out: nobody came"
    assert str(pydist.Timeout("it timed out")) == "it timed out"
    assert repr(pickle.loads(pickle.dumps(pydist.Timeout("late")))) == "Timeout('timed out: late')"


def wait_in_vain(what: str) -> str:
    pydist.init(timeout=1.0)
    if pydist.rank() == 1:
        time.sleep(3.0)
        return ""
    try:
        if what == "collective":
            pydist.all_reduce(torch.ones(4))
        elif what == "message":
            pydist.recv(torch.ones(4), 1)
        elif what == "wait":
            pydist.all_reduce(torch.ones(4), async_op=True).wait(0.2)
        else:
            pydist.new_group([0, 1])
    except pydist.Timeout as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
@pytest.mark.parametrize("what", ["collective", "message", "wait", "group"])
def test_every_timeout_says_timed_out(what: str, backend: str) -> None:
    message = rank_outcomes(wait_in_vain, 2, what, env={"PYDIST_BACKEND": backend})[0].value
    assert "timed out" in message


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "soon", True, [5]])
def test_a_bad_timeout_is_refused(timeout: Any) -> None:
    with pytest.raises(pydist.InvalidUsage, match="timeout="):
        pydist.init(timeout=timeout)
    assert not pydist.is_initialized()


STOPPED_HOST_SCRIPT = """
import os, signal, sys, time
import torch
import pydist

pydist.init(sys.argv[1], timeout=float(sys.argv[3]))
if pydist.rank() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(0.5)
began = time.monotonic()
try:
    if sys.argv[2] == "group":
        pydist.new_group([0, 1])
    else:
        pydist.all_reduce(torch.ones(4))
except pydist.Error as error:
    print(f"{time.monotonic() - began:.0f} {type(error).__name__}: {error}", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
@pytest.mark.parametrize("what", everyday("all_reduce", thorough=("group",)))
def test_a_stopped_host_of_the_store_is_no_hang(tmp_path: Path, backend: str, what: str) -> None:
    """A TCPStore whose server is stopped never answers."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED_HOST_SCRIPT)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    # Long enough for ranks that start at different times; the call under test has the same.
    timeout_s = 6 * PATIENCE
    command = [sys.executable, str(script), backend, what, str(timeout_s)]
    with subprocess.Popen(command, env=clean_environment({**place, "RANK": "0"})) as host:
        try:
            done = run_command(command, env={**place, "RANK": "1"}, timeout=60)
        finally:
            host.kill()
    took_s, _, error = done.stdout.partition(" ")
    assert int(took_s) <= 5 * timeout_s, done.stdout
    assert re.match("Timeout|TransportError", error), done.stdout
    assert "rank 0" in error
