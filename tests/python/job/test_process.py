"""Joining a job, leaving it, and agreeing on a backend."""

import atexit
import logging
import os
import pickle
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import clean_environment, free_port, rank_outcomes, run_command, run_ranks
from thorough import everyday
from torch import nn

import pydist
from pydist import metrics
from pydist.job.gpu_assignment import describe_gpus
from pydist.job.meeting import judge


def sum_of_ranks() -> float:
    total = torch.tensor([float(pydist.rank())])
    pydist.all_reduce(total)
    return float(total)


def join_and_describe(backend: str | None = None) -> tuple[Any, ...]:
    pydist.init(backend)
    return (
        pydist.rank(),
        pydist.world_size(),
        pydist.local_rank(),
        pydist.local_world_size(),
        pydist.backend(),
        sum_of_ranks(),
        dist.get_rank(),
        dist.get_backend(),
    )


@pytest.mark.parametrize("nprocs", everyday(1, 4, thorough=(2,)))
@pytest.mark.parametrize("backend", everyday(None, "gloo", thorough=("native",)))
def test_every_rank_knows_its_place(nprocs: int, backend: str | None) -> None:
    values = run_ranks(join_and_describe, nprocs, backend)
    total = float(sum(range(nprocs)))
    chosen = backend or "native"
    assert values == [
        (rank, nprocs, rank, nprocs, chosen, total, rank, "pydist") for rank in range(nprocs)
    ]


def join_leave_and_join_again() -> list[tuple[float, bool]]:
    seen = []
    for _ in range(4):
        pydist.init()
        pydist.init()  # idempotent
        joined = (sum_of_ranks(), pydist.is_initialized())
        pydist.shutdown()
        pydist.shutdown()
        assert not pydist.is_initialized()
        assert not dist.is_initialized()
        seen.append(joined)
    return seen


def test_init_and_shutdown_repeat() -> None:
    assert run_ranks(join_leave_and_join_again, 3) == [[(3.0, True)] * 4] * 3


def what_is_left() -> tuple[set[str], set[str], int]:
    """Threads by name, open files by kind, and mapped shared segments."""
    threads = {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}
    files = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "/memfd:", "/dev/shm/", "anon_inode:[pidfd]")):
            files.add(target)
    maps = Path("/proc/self/maps").read_text()
    return threads, files, maps.count("/memfd:") + maps.count("/dev/shm/")


def join_use_and_leave(backend: str) -> tuple[set[str], set[str], int]:
    for attempt in range(2):
        pydist.init(backend)
        group = pydist.new_group(range(pydist.world_size()))
        pydist.all_reduce(torch.ones(100_000), group=group)
        tensor = pydist.symmetric_empty(1000)
        pydist.all_reduce(tensor.zero_())
        del tensor, group
        pydist.shutdown()
        if attempt == 0:
            before = what_is_left()
    after = what_is_left()
    return after[0] - before[0], after[1] - before[1], after[2]


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_shutdown_leaves_nothing_behind(backend: str) -> None:
    for threads, files, segments in run_ranks(join_use_and_leave, 2, backend):
        assert threads == set()
        assert files == set()
        assert segments == 0


def ask_for_another() -> str:
    pydist.init("gloo")
    pydist.init("gloo")
    pydist.init("auto")
    with pytest.raises(pydist.InvalidUsage, match=r"'gloo' already.*'native'"):
        pydist.init("native")
    return pydist.backend()


def test_a_second_init_cannot_change_the_backend() -> None:
    assert run_ranks(ask_for_another, 2) == ["gloo", "gloo"]


def init_as_told(wishes: list[str | None]) -> None:
    rank = int(os.environ["RANK"])
    if wishes[rank] is not None:
        os.environ["PYDIST_BACKEND"] = str(wishes[rank])
    pydist.init(timeout=20)


def test_ranks_with_different_wishes_all_hear_who_said_what() -> None:
    started = time.monotonic()
    outcomes = rank_outcomes(init_as_told, 3, ["native", "gloo", "native"])
    assert time.monotonic() - started < 20
    for outcome in outcomes:
        assert outcome.error == "Mismatch"
        assert "PYDIST_BACKEND='native' on ranks 0, 2" in outcome.message
        assert "PYDIST_BACKEND='gloo' on rank 1" in outcome.message


def test_an_unknown_backend_on_one_rank_is_an_error_on_all() -> None:
    for outcome in rank_outcomes(init_as_told, 3, [None, "fastest", None]):
        assert outcome.error == "InvalidUsage"
        assert "rank 1: PYDIST_BACKEND='fastest' is not valid" in outcome.message
        assert "auto, native, nccl, gloo" in outcome.message


def test_nccl_without_gpus_says_why_not() -> None:
    for outcome in rank_outcomes(
        init_as_told, 2, ["nccl", "nccl"], env={"CUDA_VISIBLE_DEVICES": ""}
    ):
        assert outcome.error == "InvalidUsage"
        assert "ranks 0, 1 have no GPU" in outcome.message


def join_unless_last(seconds: float) -> None:
    if pydist_rank_from_environment() != int(os.environ["WORLD_SIZE"]) - 1:
        pydist.init(timeout=seconds)


def pydist_rank_from_environment() -> int:
    return int(os.environ["RANK"])


def test_a_rank_that_never_joins_is_named() -> None:
    outcomes = rank_outcomes(join_unless_last, 3, 2.0)
    for outcome in outcomes[:2]:
        assert outcome.error == "Timeout"
        assert "rank 2 of 3 did not join within 2 s" in outcome.message


def fall_back(log_level: int) -> tuple[str, float]:
    logging.basicConfig(level=log_level, format="%(name)s %(levelname)s %(message)s")
    pydist.init()
    return pydist.backend(), sum_of_ranks()


def on_hosts_of_their_own(log_level: int) -> tuple[str, float]:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    return fall_back(log_level)


def test_auto_takes_gloo_where_native_cannot_serve_and_says_so_once() -> None:
    outcomes = rank_outcomes(on_hosts_of_their_own, 2, logging.WARNING)
    assert [outcome.value for outcome in outcomes] == [("gloo", 1.0)] * 2
    assert outcomes[0].output.count("pydist WARNING backend gloo on 2 ranks (native can't") == 1
    assert "backend gloo" not in outcomes[1].output


def test_auto_tells_what_it_took_at_info() -> None:
    outcomes = rank_outcomes(fall_back, 2, logging.INFO)
    assert [outcome.value for outcome in outcomes] == [("native", 1.0)] * 2
    assert outcomes[0].output.count("pydist INFO backend native on 2 ranks") == 1
    assert "backend native" not in outcomes[1].output


def native_on_hosts_of_their_own() -> None:
    os.environ["PYDIST_HOST_ID"] = f"host {os.environ['RANK']}"
    pydist.init("native")


def test_native_asked_for_but_impossible_is_the_same_error_everywhere() -> None:
    outcomes = rank_outcomes(native_on_hosts_of_their_own, 2)
    assert [outcome.error for outcome in outcomes] == ["TransportError"] * 2
    assert outcomes[0].message == outcomes[1].message


def test_info_line_appears_with_pydist_log() -> None:
    done = run_command(
        [sys.executable, "-c", "import pydist; pydist.init(); pydist.shutdown()"],
        env={"PYDIST_LOG": "info"},
    )
    assert done.returncode == 0, done.stderr
    assert "pydist[rank 0] info: backend native on 1 rank" in done.stderr


def test_a_misspelt_variable_is_warned_of() -> None:
    done = run_command(
        [sys.executable, "-c", "import pydist; pydist.init()"], env={"PYDIST_BACKENDS": "gloo"}
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("PYDIST_BACKENDS") == 1
    assert "did you mean PYDIST_BACKEND?" in done.stderr


def adopt(torch_backend: str) -> tuple[Any, ...]:
    dist.init_process_group(torch_backend)
    pydist.init()
    seen = (sum_of_ranks(), pydist.backend(), pydist.local_rank(), dist.get_backend())
    pydist.shutdown()
    assert dist.is_initialized()
    # The script's group works on, and can be adopted once more.
    check = torch.ones(1)
    dist.all_reduce(check)
    assert check == dist.get_world_size()
    dist.destroy_process_group()
    return seen


@pytest.mark.parametrize("nprocs", everyday(3, thorough=(1, 2)))
@pytest.mark.parametrize("torch_backend", ["gloo", "pydist", "cpu:gloo", "cpu:pydist,cuda:pydist"])
def test_a_group_of_the_script_is_adopted(nprocs: int, torch_backend: str) -> None:
    total = float(sum(range(nprocs)))
    for rank, value in enumerate(run_ranks(adopt, nprocs, torch_backend)):
        assert value[:3] == (total, "native", rank)
        assert torch_backend in (value[3], value[3].lower(), "cpu:gloo", "cpu:pydist,cuda:pydist")


def adopt_a_world_of_one_without_a_server() -> float:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pydist.init()
    return sum_of_ranks()


def test_a_world_of_one_on_a_hash_store_is_adopted() -> None:
    nothing = {"RANK": None, "WORLD_SIZE": None, "MASTER_ADDR": None}
    nothing |= {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
    assert run_ranks(adopt_a_world_of_one_without_a_server, 1, env=nothing) == [0.0]


def survive_a_destroyed_group() -> tuple[bool, float]:
    pydist.init()
    dist.destroy_process_group()
    left = pydist.is_initialized()
    pydist.init()
    return left, sum_of_ranks()


def test_init_starts_anew_after_destroy_process_group() -> None:
    assert run_ranks(survive_a_destroyed_group, 2) == [(False, 1.0)] * 2


def collectives_on_torch_groups() -> list[float]:
    pydist.init()
    rank = pydist.rank()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 1])]
    foreign = dist.new_group([0, 2], backend="gloo")
    seen = []
    for group in (*pairs, foreign):
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            tensor = torch.tensor([float(10**rank)])
            pydist.all_reduce(tensor, group=group)
            seen.append(float(tensor))
        else:
            with pytest.raises(pydist.InvalidUsage, match="not a member"):
                pydist.all_reduce(torch.ones(1), group=group)
    return seen


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_groups_of_torch_carry_our_collectives(backend: str) -> None:
    values = run_ranks(collectives_on_torch_groups, 3, env={"PYDIST_BACKEND": backend})
    assert values == [[11.0, 101.0], [11.0, 110.0], [110.0, 101.0]]


def subgroups() -> list[Any]:
    pydist.init()
    rank, size = pydist.rank(), pydist.world_size()
    reversed_world = pydist.new_group(range(size - 1, -1, -1))
    assert not isinstance(reversed_world, int)
    even = pydist.new_group([r for r in range(size) if r % 2 == 0])
    assert (even is dist.GroupMember.NON_GROUP_MEMBER) == (rank % 2 == 1)
    seen: list[Any] = [reversed_world.rank]
    if not isinstance(even, int):
        gathered = pydist.all_gather(torch.tensor([rank]), group=even)
        first = pydist.new_group([0], group=even)
        seen += [gathered.tolist(), first is not dist.GroupMember.NON_GROUP_MEMBER]
    return seen


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_new_group(backend: str) -> None:
    values = run_ranks(subgroups, 4, env={"PYDIST_BACKEND": backend})
    assert values == [[3, [0, 2], True], [2], [1, [0, 2], False], [0]]


def calls_on_a_group(group: Any, folder: str) -> dict[str, Callable[[], object]]:
    """All that pydist does on a group, as the ranks outside of it would call it by mistake."""
    x = torch.ones(4)
    kept: dict[str, Any] = {"path": f"{folder}/kept", "process_group": group}
    ledger = pydist.DistributedSampler(range(4), num_replicas=1, rank=0).ledger()
    return {
        "all_reduce": lambda: pydist.all_reduce(x, group=group),
        "reduce_scatter": lambda: pydist.reduce_scatter(x, group=group),
        "all_gather": lambda: pydist.all_gather(x, group=group),
        "broadcast": lambda: pydist.broadcast(x, group=group),
        "reduce": lambda: pydist.reduce(x, group=group),
        "gather": lambda: pydist.gather(x, group=group),
        "scatter": lambda: pydist.scatter(x, out=torch.empty(1), group=group),
        "all_to_all": lambda: pydist.all_to_all(x, group=group),
        "send": lambda: pydist.send(x, 0, group=group),
        "recv": lambda: pydist.recv(x, 0, group=group),
        "barrier": lambda: pydist.barrier(group=group),
        "symmetric_empty": lambda: pydist.symmetric_empty(4, group=group),
        "new_group": lambda: pydist.new_group([0], group=group),
        "DataParallel": lambda: pydist.DataParallel(nn.Linear(2, 2), process_group=group),
        "ShardedOptimizer": lambda: pydist.ShardedOptimizer(
            nn.Linear(2, 2).parameters(), torch.optim.SGD, process_group=group, lr=0.1
        ),
        "SyncBatchNorm": lambda: pydist.SyncBatchNorm(4, process_group=group)(torch.ones(2, 4)),
        "converted": lambda: pydist.SyncBatchNorm.convert_sync_batchnorm(
            nn.Sequential(nn.BatchNorm1d(4)), group
        )(torch.ones(2, 4)),
        "save": lambda: pydist.save(model=nn.Linear(2, 2), **kept),
        "load": lambda: pydist.load(model=nn.Linear(2, 2), **kept),
        "evaluate": lambda: pydist.evaluate(None, [1], lambda _, batch: {"x": x}, group=group),
        "metrics.mean": lambda: metrics.mean(x, group=group),
        "Metric.compute": lambda: metrics.Mean().compute(group),
        "Rows.compute": lambda: metrics.Rows().compute(group),
        "gather_ragged": lambda: metrics.gather_ragged(x, group=group),
        "all_gather_ragged": lambda: metrics.all_gather_ragged(x, group=group),
        "Ledger.combined": lambda: ledger.combined(group),
    }


def call_from_outside(folder: str) -> dict[str, str]:
    pydist.init()
    groups = {"pydist": pydist.new_group([0, 1]), "torch": dist.new_group([0, 1])}
    said = {}
    if pydist.rank() == 2:
        for maker, group in groups.items():
            for name, call in calls_on_a_group(group, folder).items():
                said[f"{name}, {maker}"] = "taken"
                try:
                    call()
                except pydist.Error as error:
                    said[f"{name}, {maker}"] = f"{type(error).__name__}: {error}"
    # The others have heard nothing of it.
    assert pydist.all_reduce(torch.ones(1)).item() == 3
    return said


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_a_rank_outside_of_a_group_is_refused(backend: str, tmp_path: Path) -> None:
    env = {"PYDIST_BACKEND": backend, "PYDIST_TIMEOUT": "20"}
    *_, outside = run_ranks(call_from_outside, 3, str(tmp_path), env=env)
    assert len(outside) == 2 * 26
    for name, said in outside.items():
        assert said.startswith("InvalidUsage: this rank is not a member of the group"), (name, said)
        assert "`if rank in ranks:`" in said


def test_what_is_no_group_is_refused_by_its_type() -> None:
    pydist.init()
    try:
        for wrong in (np.array([0, 1]), torch.tensor([0, 1]), [0], 3, "world"):
            with pytest.raises(pydist.InvalidUsage, match=r"group= is a \w+; it must be"):
                pydist.barrier(group=wrong)  # type: ignore[call-overload]
    finally:
        pydist.shutdown()


def groups_dropped_at_once() -> int:
    pydist.init()
    for _ in range(60):
        pydist.new_group(range(pydist.world_size()))
    return pydist.world_size()


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_a_rank_may_leave_a_new_group_while_others_still_connect(backend: str) -> None:
    assert run_ranks(groups_dropped_at_once, 4, env={"PYDIST_BACKEND": backend}) == [4] * 4


@pytest.mark.parametrize("ranks", [[], [0, 0], [1], [-1]])
def test_new_group_refuses(ranks: list[int]) -> None:
    pydist.init()
    try:
        with pytest.raises(pydist.InvalidUsage, match="must name at least one rank"):
            pydist.new_group(ranks)
    finally:
        pydist.shutdown()


def registered_without_init(name: str) -> tuple[float, str]:
    dist.init_process_group(name)
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    backend = dist.get_backend()
    dist.destroy_process_group()
    return float(tensor.sum()), backend


def test_torch_runs_on_the_backend_without_init() -> None:
    assert run_ranks(registered_without_init, 2, "pydist") == [(10.0, "pydist")] * 2


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


NOTEBOOK = """
import os, socket, sys
import torch
import pydist
import torch.distributed as dist

backend, how = sys.argv[1:3]
os.environ["PYDIST_BACKEND"] = backend
PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

def train(size):
    torch.manual_seed(1)
    model = pydist.DataParallel(torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((2, 4), 1.0 + pydist.rank())).sum().backward()
    optimizer.step()
    total = torch.tensor([float(pydist.rank() + 1)])
    pydist.all_reduce(total)
    assert pydist.world_size() == size and total.item() == size * (size + 1) / 2
    assert model.weight.grad[0].tolist() == [1.0 + size] * 4
    return model, optimizer

def leave():
    pydist.shutdown()
    if how == "destroy":
        dist.destroy_process_group()

def rank_of_a_fork(rank, port):
    os.environ.update(zip(PLACE, (str(rank), "2", "127.0.0.1", str(port))))
    if how == "destroy":
        dist.init_process_group("pydist")
    train(2)
    leave()
    os._exit(0)

def launch():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            try:
                rank_of_a_fork(rank, port)
            except BaseException as error:
                os.write(2, f"{type(error).__name__}: {error}\\n".encode())
            os._exit(1)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]

kept = []
for _ in range(2):
    if how == "destroy":
        dist.init_process_group("pydist", store=dist.HashStore(), rank=0, world_size=1)
    kept.append(train(1))
    leave()
    # The notebook still has the model, the optimizer and the last gradients.
    print(launch(), flush=True)
if how == "destroy":
    dist.init_process_group("pydist", store=dist.HashStore(), rank=0, world_size=1)
train(1)
print("parent", flush=True)
"""


@pytest.mark.parametrize("how", ["shutdown", "destroy"])
@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_a_process_that_has_left_its_job_may_fork_ranks(
    tmp_path: Path, backend: str, how: str
) -> None:
    script = tmp_path / "notebook.py"
    script.write_text(NOTEBOOK)
    done = run_command([sys.executable, str(script), backend, how], timeout=90)
    assert done.stdout == "[0, 0]\n[0, 0]\nparent\n", done.stderr


def fork_after_leaving(backend: str) -> list[Any]:
    pydist.init(backend)
    model = pydist.DataParallel(nn.Linear(3, 3))
    model(torch.ones(2, 3)).sum().backward()
    told: list[Any] = []

    def child_says(act: Callable[[], object]) -> int:
        child = os.fork()
        if child == 0:
            try:
                act()
                os._exit(0)
            except pydist.InvalidUsage:
                os._exit(7)
            finally:
                os._exit(1)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def alone() -> None:
        os.environ.update(RANK="0", WORLD_SIZE="1")
        pydist.init(backend)
        net = pydist.DataParallel(nn.Linear(3, 3))
        net(torch.ones(2, 3)).sum().backward()
        pydist.shutdown()

    told.append(child_says(alone))  # amid the job
    pydist.barrier()
    pydist.shutdown()
    told.append(child_says(alone))
    # What the child has inherited is of no use to it, and no harm to the parent.
    told.append(child_says(lambda: model(torch.ones(2, 3)).sum().backward()))
    pydist.init(backend)
    again = pydist.DataParallel(nn.Linear(3, 3))
    again(torch.ones(2, 3)).sum().backward()
    return [*told, sum_of_ranks()]


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_only_a_fork_amid_the_job_is_refused(backend: str) -> None:
    for amid, after, inherited, total in run_ranks(fork_after_leaving, 2, backend):
        assert (amid, after, total) == (7, 0, 1.0)
        assert inherited in (1, 7)


def test_a_world_of_one_needs_no_server_and_ends_by_itself() -> None:
    script = (
        "import pydist, torch; pydist.init(timeout=3); t = torch.ones(2); pydist.all_reduce(t);"
        "assert pydist.world_size() == 1 and t.sum() == 2; print(pydist.backend())"
    )
    done = run_command([sys.executable, "-c", script])
    assert (done.returncode, done.stdout, done.stderr) == (0, "native\n", "")


def test_calls_before_init_say_what_to_do() -> None:
    pydist.shutdown()
    for call in (pydist.rank, pydist.world_size, pydist.backend, pydist.barrier):
        with pytest.raises(pydist.InvalidUsage, match=r"call pydist\.init\(\) first"):
            call()
    for group in (None, "world"):
        with pytest.raises(pydist.InvalidUsage):
            pydist.all_reduce(torch.ones(1), group=group)  # type: ignore[call-overload]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_bad_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(pydist.InvalidUsage, match="timeout="):
        pydist.init(timeout=timeout)
    assert not pydist.is_initialized()


def test_half_a_job_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pydist.InvalidUsage, match="WORLD_SIZE set, RANK, MASTER_ADDR, MASTER_PORT"):
        pydist.init()
    assert not dist.is_initialized()


def test_judging_hellos() -> None:
    hello = {"host": "a", "pydist": "1", "torch": "2", "wish": "auto", "source": "PYDIST_BACKEND"}
    hello.update(describe_gpus(wants_nccl=True), network={})
    verdict = judge([hello, {**hello, "host": "b"}])
    assert (verdict["wish"], verdict["hosts"]) == ("auto", ["a", "b"])
    verdict = judge([hello, {**hello, "torch": "3"}, hello])
    assert verdict["error"] == "Mismatch"
    assert "torch 2 on ranks 0, 2; torch 3 on rank 1" in verdict["message"]
    verdict = judge([{**hello, "wish": "gloo", "source": "backend="}, hello])
    assert "backend='gloo' on rank 0; PYDIST_BACKEND='auto' on rank 1" in verdict["message"]


def exit_of_forked_child() -> tuple[int, float]:
    pydist.init()
    child = os.fork()
    if child == 0:
        # What the end of a forked process that does not take care to avoid it does.
        atexit._run_exitfuncs()
        os._exit(3 if pydist.is_initialized() else 0)
    _, status = os.waitpid(child, 0)
    pydist.barrier()
    return os.waitstatus_to_exitcode(status), sum_of_ranks()


def test_a_forked_child_neither_belongs_to_the_job_nor_ends_it() -> None:
    for code, total in run_ranks(exit_of_forked_child, 2, method="spawn"):
        assert (code, total) == (0, 1.0)


STOPPED_HOST_SCRIPT = """
import os, signal, sys, time
import torch
import pydist

pydist.init(sys.argv[1], timeout=6)
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
@pytest.mark.parametrize("what", ["all_reduce", "group"])
def test_a_stopped_host_of_the_store_is_no_hang(tmp_path: Path, backend: str, what: str) -> None:
    """A TCPStore whose server is stopped never answers."""
    script = tmp_path / "script.py"
    script.write_text(STOPPED_HOST_SCRIPT)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, str(script), backend, what]
    with subprocess.Popen(command, env=clean_environment({**place, "RANK": "0"})) as host:
        try:
            done = run_command(command, env={**place, "RANK": "1"}, timeout=60)
        finally:
            host.kill()
    took_s, _, error = done.stdout.partition(" ")
    assert int(took_s) <= 30, done.stdout
    assert re.match("Timeout|TransportError", error), done.stdout
    assert "rank 0" in error
