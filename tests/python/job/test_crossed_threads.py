"""Models that several threads of each rank build: paired rightly, or refused on all ranks."""

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_ranks
from thorough import everyday
from torch import nn

import pydist
from pydist.job import groups

pytestmark = pytest.mark.timeout(90)

BACKENDS = pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
RANKS = pytest.mark.parametrize("nprocs", [2, 3])


def in_threads(
    tasks: Iterable[tuple[str, Callable[[], Any]]], pause_s: float = 0
) -> dict[str, Any]:
    """Runs each task in a thread of its name, started in this order; what they return, or raise."""
    results: dict[str, Any] = {}

    def run(name: str, task: Callable[[], Any]) -> None:
        try:
            results[name] = task()
        except Exception as error:
            results[name] = error

    threads = [threading.Thread(target=run, args=each, name=each[0]) for each in tasks]
    for thread in threads:
        thread.start()
        time.sleep(pause_s)
    for thread in threads:
        thread.join()
    for result in results.values():
        if isinstance(result, Exception):
            raise result
    return results


def backwards(items: Iterable[Any]) -> list[Any]:
    """The same on even ranks, in reverse on odd ones."""
    items = list(items)
    return items[::-1] if dist.get_rank() % 2 else items


def model_of(seed: float) -> nn.Module:
    net = nn.Linear(3, 2)
    nn.init.constant_(net.weight, seed)
    return net


def gradient_of(model: pydist.DataParallel, seed: float) -> float:
    """The averaged gradient, which tells with which models of other ranks this one was joined."""
    model.zero_grad()
    model(torch.full((1, 3), float(seed * (pydist.rank() + 1)))).sum().backward()
    return float(model.module.weight.grad[0, 0])


def expected(seed: float) -> float:
    return seed * (pydist.world_size() + 1) / 2


def build_crosswise(pause_s: float, names: tuple[str, str] | None = None) -> list[str]:
    """Names of the threads in the order of their start; by default each has that of its model."""
    pydist.init(timeout=30)
    built = threading.Barrier(2)

    def work(seed: float) -> str:
        try:
            model = pydist.DataParallel(model_of(seed))
            gradient_of(model, seed)
        except pydist.Error as error:
            built.wait(30)
            return f"{type(error).__name__}: {error}"
        # The thread lives on while the other one builds, as one that trains does.
        built.wait(30)
        try:
            for _ in range(3):
                gradient_of(model, seed)
        except pydist.Error as error:
            return f"{type(error).__name__}: {error}"
        return "trained"

    tasks = backwards([("a", lambda: work(10)), ("b", lambda: work(1000))])
    if names is not None:
        tasks = [(name, task) for name, (_, task) in zip(names, tasks, strict=True)]
    return list(in_threads(tasks, pause_s).values())


@BACKENDS
@RANKS
def test_threads_that_met_crosswise_raise_on_all_ranks(backend: str, nprocs: int) -> None:
    env = {"PYDIST_BACKEND": backend}
    for told in run_ranks(build_crosswise, nprocs, 0.3, env=env):
        assert len(told) == 2
        for message in told:
            assert "makes groups as well. Threads that make groups at the same time" in message
        assert any(message.startswith("Mismatch: thread ") for message in told), told


@BACKENDS
@RANKS
@pytest.mark.parametrize(
    "names", [("Thread-1 (work)", "Thread-2 (work)"), ("pool-0_0", "pool-0_1")]
)
def test_threads_with_counted_names_may_not_build_beside_each_other(
    backend: str, nprocs: int, names: tuple[str, str]
) -> None:
    """The first thread of each rank has the first number, whichever model it builds."""
    env = {"PYDIST_BACKEND": backend}
    for told in run_ranks(build_crosswise, nprocs, 0.3, names, env=env):
        assert len(told) == 2
        for message in told:
            assert "a number does not tell which threads of the ranks belong together" in message
        assert any(message.startswith("Mismatch: thread ") for message in told), told


def build_one_after_the_other() -> list[str]:
    """No thread knows of the other one: each has ended before the other begins."""
    pydist.init(timeout=30)
    models = []

    def work(seed: float) -> str:
        try:
            models.append(pydist.DataParallel(model_of(seed)))
        except pydist.Error as error:
            return f"{type(error).__name__}: {error}"
        return "built"

    told = []
    for name, seed in backwards([("a", 10), ("b", 1000)]):
        told += in_threads([(name, lambda seed=seed: work(seed))]).values()
    try:
        gradient_of(models[0], 10)
    except pydist.Error as error:
        told.append(f"{type(error).__name__}: {error}")
    return told


@BACKENDS
@RANKS
def test_threads_that_ended_before_the_other_began_are_crossed(backend: str, nprocs: int) -> None:
    env = {"PYDIST_BACKEND": backend}
    for told in run_ranks(build_one_after_the_other, nprocs, env=env):
        assert [message.partition(":")[0] for message in told[:2]] == ["built", "Mismatch"], told
        assert "makes groups as well" in told[2], told


def name_worker_threads_otherwise() -> float:
    """Frameworks count their threads: those of rank 1 have other numbers than those of rank 0."""
    pydist.init(timeout=30)
    names = [f"worker-{pydist.rank() + number}" for number in range(3)]
    results = [
        in_threads([(name, lambda: gradient_of(pydist.DataParallel(model_of(10)), 10))])
        for name in names
    ]
    return sum(value for result in results for value in result.values())


@BACKENDS
def test_worker_threads_may_be_counted_otherwise_on_each_rank(backend: str) -> None:
    env = {"PYDIST_BACKEND": backend}
    assert run_ranks(name_worker_threads_otherwise, 2, env=env) == [45.0, 45.0]


def build_in_order() -> None:
    """The threads take turns, by their own means, or are built by the main thread."""
    pydist.init()
    turns = {name: threading.Event() for name in "ab"}
    turns["a"].set()

    def work(seed: float, mine: str, other: str) -> float:
        assert turns[mine].wait(30)
        model = pydist.DataParallel(model_of(seed))
        turns[other].set()
        return gradient_of(model, seed)

    tasks = [("a", lambda: work(10, "a", "b")), ("b", lambda: work(1000, "b", "a"))]
    assert in_threads(backwards(tasks)) == {"a": expected(10), "b": expected(1000)}


@BACKENDS
@RANKS
def test_threads_that_build_in_turn_work(backend: str, nprocs: int) -> None:
    run_ranks(build_in_order, nprocs, env={"PYDIST_BACKEND": backend})


def train_in_threads_of_other_names() -> None:
    """One thread a rank makes groups, with another name on each: names say nothing."""
    pydist.init()
    rank = pydist.rank()
    for turn in range(3):
        # The name was another rank's, whose thread has ended.
        name = f"Thread-{rank + turn}"
        result = in_threads([(name, lambda: gradient_of(pydist.DataParallel(model_of(10)), 10))])
        assert result == {name: expected(10)}
    work = in_threads if rank else lambda tasks: {name: task() for name, task in tasks}
    result = work([("worker", lambda: gradient_of(pydist.DataParallel(model_of(10)), 10))])
    assert result == {"worker": expected(10)}


@BACKENDS
@RANKS
def test_a_thread_a_rank_may_have_any_name(backend: str, nprocs: int) -> None:
    run_ranks(train_in_threads_of_other_names, nprocs, env={"PYDIST_BACKEND": backend})


def build_on_groups_of_their_own() -> None:
    """The remedy that the error names, with names that are crossed."""
    pydist.init()
    rank, ranks = pydist.rank(), range(pydist.world_size())
    own: list[Any] = [pydist.new_group(ranks) for _ in range(3)]

    def work(seed: float, group: Any) -> float:
        model = pydist.DataParallel(model_of(seed), process_group=group)
        gradient = gradient_of(model, seed)
        model.zero_grad()
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, lr=0.0)
        optimizer.step()
        return gradient

    for _ in range(3):
        results = in_threads(
            (f"builder {(number + rank) % 3}", lambda n=number: (n, work(10.0**n, own[n])))
            for number in backwards(range(3))
        )
        assert sorted(results.values(), key=str) == [(n, expected(10.0**n)) for n in range(3)]


@BACKENDS
@RANKS
def test_threads_build_at_once_on_groups_of_their_own(backend: str, nprocs: int) -> None:
    """On gloo too, which waits for its peers inside the store's client."""
    run_ranks(build_on_groups_of_their_own, nprocs, env={"PYDIST_BACKEND": backend})


def meet_one_group_in_two_threads() -> None:
    """A group of another backend is met by whoever needs it first."""
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    met = in_threads(backwards([(name, lambda: groups.communicator_of(group)) for name in "ab"]))
    assert met["a"] is met["b"]
    total = torch.ones(2)
    pydist.all_reduce(total, group=group)
    assert total.tolist() == [dist.get_world_size()] * 2


@RANKS
def test_threads_meet_a_group_of_another_backend_once(nprocs: int) -> None:
    run_ranks(meet_one_group_in_two_threads, nprocs)


def normalise_in_threads() -> None:
    pydist.init()
    size, rank = pydist.world_size(), pydist.rank()
    layers = [pydist.SyncBatchNorm(2, affine=False, momentum=None) for _ in range(2)]
    models = [pydist.DataParallel(nn.Sequential(nn.Linear(2, 2), layer)) for layer in layers]
    for model in models:
        nn.init.eye_(model.module[0].weight)
        nn.init.zeros_(model.module[0].bias)

    def work(number: int) -> list[float]:
        for step in range(20):
            x = torch.full((2, 2), float(1000**number * (rank + 1) + step)) + torch.eye(2)
            models[number](x).sum().backward()
        mean = layers[number].running_mean
        assert mean is not None
        return [round(float(value), 3) for value in mean]

    results = in_threads(backwards((str(number), lambda n=number: work(n)) for number in range(2)))
    for number in range(2):
        assert results[str(number)] == [1000**number * (size + 1) / 2 + 9.5 + 0.5] * 2


@BACKENDS
@RANKS
def test_layers_of_models_in_threads_talk_apart(backend: str, nprocs: int) -> None:
    run_ranks(normalise_in_threads, nprocs, env={"PYDIST_BACKEND": backend})
