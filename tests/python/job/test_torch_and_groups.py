"""Groups: of the script that pydist adopts, of torch that carry its collectives, and its own."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from thorough import everyday
from torch import nn

import pydist
from pydist import metrics


def sum_of_ranks() -> float:
    total = torch.tensor([float(pydist.rank())])
    pydist.all_reduce(total)
    return float(total)


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


def adopt_across_hosts() -> list[Any]:
    """On two hosts, as ranks tell them: what the script's ranks have agreed on stays known."""
    rank = int(os.environ["RANK"])
    os.environ["PYDIST_HOST_ID"] = "far" if rank == 2 else "near"
    dist.init_process_group("pydist")
    early = pydist.new_group([2, 0], group=dist.group.WORLD)
    seen: list[Any] = []
    for turn in range(2):
        with pytest.raises(pydist.InvalidUsage, match=r"default group runs .* with a time-out"):
            pydist.init(timeout=7)
        for _ in range(2):
            pydist.init()
        with pytest.raises(pydist.InvalidUsage, match="pydist runs with a time-out of"):
            pydist.init(timeout=7)
        seen.append((pydist.local_rank(), pydist.local_world_size()))
        if turn == 0 and rank != 1:
            assert pydist.all_reduce(torch.ones(1), group=early) == 2
        pydist.shutdown()
    dist.destroy_process_group()
    # Another group of the script's agrees anew.
    os.environ["PYDIST_HOST_ID"] = "near"
    dist.init_process_group("pydist")
    pydist.init()
    return [*seen, (pydist.local_rank(), pydist.local_world_size())]


def test_a_group_of_the_script_keeps_what_its_ranks_have_agreed_on() -> None:
    silent = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
    assert run_ranks(adopt_across_hosts, 3, env=silent) == [
        [(0, 2), (0, 2), (0, 3)],
        [(1, 2), (1, 2), (1, 3)],
        [(0, 1), (0, 1), (2, 3)],
    ]


def leave_one_for_another() -> list[Any]:
    """The script destroys the group that pydist has made, and makes its own."""
    os.environ["PYDIST_HOST_ID"] = "far" if os.environ["RANK"] == "2" else "near"
    pydist.init()
    dist.destroy_process_group()
    dist.init_process_group("pydist")
    pydist.init()
    return [pydist.local_rank(), pydist.local_world_size(), sum_of_ranks()]


def test_a_group_of_the_script_after_one_of_pydists() -> None:
    silent = {"LOCAL_RANK": None, "LOCAL_WORLD_SIZE": None}
    assert run_ranks(leave_one_for_another, 3, env=silent) == [
        [0, 2, 3.0],
        [1, 2, 3.0],
        [0, 1, 3.0],
    ]


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
            with pytest.raises(pydist.InvalidUsage, match=r"group= is an? \w+; it must be"):
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


def leave_torchs_group(how: str) -> tuple[str, tuple[int, ...]]:
    pydist.init(timeout=20.0)
    pydist.barrier()
    if pydist.rank() == 2:
        time.sleep(0.3)
        if how == "leaves":
            pydist.shutdown()
            time.sleep(3.0)  # its end tells nobody
            return "", ()
        pydist.abort("enough")
    begin_s = time.monotonic()
    with pytest.raises((pydist.PeerLost, pydist.Aborted)) as caught:
        dist.new_group([0, 1, 2])
    assert time.monotonic() - begin_s < 10.0  # before the time-out
    return type(caught.value).__name__, caught.value.ranks


@pytest.mark.parametrize("backend", ["native", "gloo"])
@pytest.mark.parametrize(("how", "error"), [("leaves", "PeerLost"), ("aborts", "Aborted")])
def test_torchs_new_group_hears_of_ranks_that_will_not_come(
    backend: str, how: str, error: str
) -> None:
    told = run_ranks(leave_torchs_group, 3, how, env={"PYDIST_BACKEND": backend})
    assert told[:2] == [(error, (2,))] * 2
