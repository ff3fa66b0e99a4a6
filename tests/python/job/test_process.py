"""Joining a job, leaving it, and agreeing on a backend."""

import atexit
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import NO_LAUNCHER, rank_outcomes, run_command, run_ranks
from thorough import everyday
from torch import nn

import pydist
from pydist.job.meeting.backend_agreement import judge
from pydist.job.meeting.gpu_assignment import describe_gpus


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


def train_and_leave() -> nn.Module:
    pydist.init("native")
    model = pydist.DataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    pydist.barrier()
    pydist.shutdown()
    return model


def leave_and_keep_the_model() -> set[str]:
    """The threads that are left."""
    train_and_leave()
    before = what_is_left()
    model = train_and_leave()
    gradient = model.module.weight.grad
    threads, files, _ = what_is_left()
    assert float(gradient.sum()) == 32.0  # its memory is still there
    left = [file for file in files - before[1] if not file.startswith("/memfd:")]
    assert len(left) == 1  # torch's group, which a wrapper has, has the job's store
    return threads - before[0]


def test_shutdown_leaves_no_thread_to_a_model_that_the_program_keeps() -> None:
    assert run_ranks(leave_and_keep_the_model, 2) == [set(), set()]


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
    os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
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
    os.environ["PYDIST_INTERFACE"] = "none0"  # so native can't join hosts
    pydist.init("native")


def test_native_asked_for_but_impossible_is_the_same_error_everywhere() -> None:
    outcomes = rank_outcomes(native_on_hosts_of_their_own, 2)
    assert [outcome.error for outcome in outcomes] == ["TransportError"] * 2
    assert outcomes[0].message == outcomes[1].message


def join_and_leave() -> None:
    pydist.init()
    pydist.shutdown()


@pytest.mark.parametrize(
    ("levels", "is_there"),
    [("info", True), ("error,job=info", True), ("info,job=error", False), ("warning", False)],
)
def test_info_line_appears_with_pydist_log(levels: str, is_there: bool) -> None:
    (done,) = rank_outcomes(join_and_leave, 1, env={**NO_LAUNCHER, "PYDIST_LOG": levels})
    assert done.ok, done.describe()
    line = f"pydist[rank 0 on host {socket.gethostname()}] info: job: backend native on 1 rank"
    assert (line in done.output) == is_there


def test_a_subsystem_that_is_not_there_is_refused() -> None:
    (done,) = rank_outcomes(join_and_leave, 1, env={**NO_LAUNCHER, "PYDIST_LOG": "nerves=debug"})
    assert done.error == "InvalidUsage"
    assert "there is no subsystem 'nerves'; use one of:" in done.message


def test_a_misspelt_variable_is_warned_of() -> None:
    (done,) = rank_outcomes(join_and_leave, 1, env={**NO_LAUNCHER, "PYDIST_BACKENDS": "gloo"})
    assert done.ok, done.describe()
    assert done.output.count("PYDIST_BACKENDS") == 1
    assert "did you mean PYDIST_BACKEND?" in done.output


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


@pytest.mark.parametrize("how", everyday("shutdown", thorough=("destroy",)))
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

    told += [child_says(alone), child_says(pydist.init)]  # amid the job
    assert child_says(pydist.shutdown) == 0
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
    for amid, joining, after, inherited, total in run_ranks(fork_after_leaving, 2, backend):
        assert (amid, joining, after, total) == (7, 7, 0, 1.0)
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


def test_half_a_job_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(pydist.InvalidUsage, match="WORLD_SIZE set, RANK, MASTER_ADDR, MASTER_PORT"):
        pydist.init()
    assert not dist.is_initialized()


def test_judging_hellos() -> None:
    hello = {"host": "a", "pydist": "1", "torch": "2", "wish": "auto", "source": "PYDIST_BACKEND"}
    hello.update(describe_gpus(wants_nccl=True), network={}, process={})
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
