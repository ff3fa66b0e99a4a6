"""The collectives as users call them; that they compute right is the conformance suite's matter."""

import doctest
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from launch import Ranks, run_ranks
from thorough import everyday

import pydist


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one."""
    pydist.init()
    yield
    pydist.shutdown()


MODULES = ["collectives", "job.membership", "job.groups", "job.spawn"]
MODULES += ["parallel.large_batch", "parallel.sync_batch_norm"]
MODULES += ["metrics.means", "metrics.classification", "metrics.ragged", "metrics.rows"]
MODULES += ["evaluation.evaluate", "sampling.order", "sampling.audit", "sampling.sampler"]
MODULES += ["sampling.batch_sampler", "sampling.loader"]
MODULES += ["nn.blocks", "nn.reductions", "nn.messages", "nn.gathered_outputs", "nn.contrastive"]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    module = importlib.import_module(f"pydist.{name}")
    try:
        failed, attempted = doctest.testmod(module)
    finally:
        pydist.shutdown()
    assert failed == 0
    assert attempted > 0


def every_collective() -> dict[str, Any]:
    """All collectives with the outputs that they make themselves."""
    pydist.init()
    rank, size = pydist.rank(), pydist.world_size()
    t = torch.tensor([float(rank), 1.0])
    seen: dict[str, Any] = {}
    seen["all_reduce"] = pydist.all_reduce(t.clone()).tolist()
    seen["premul_sum"] = pydist.all_reduce(t.clone(), "premul_sum", factor=float(rank)).tolist()
    seen["reduce_scatter"] = pydist.reduce_scatter(torch.ones(size, 2)).tolist()
    seen["reduce_scatter of a list"] = pydist.reduce_scatter(
        [torch.full((3,), float(r)) for r in range(size)], "max"
    ).tolist()
    seen["all_gather"] = pydist.all_gather(t).tolist()
    seen["all_gather of a scalar"] = pydist.all_gather(torch.tensor(rank)).tolist()
    seen["broadcast"] = pydist.broadcast(t.clone(), root=1).tolist()
    reduced = pydist.reduce(t.clone(), root=1)
    seen["reduce"] = None if reduced is None else reduced.tolist()
    gathered = pydist.gather(t, root=1)
    seen["gather"] = None if gathered is None else gathered.tolist()
    blocks = torch.arange(float(size)) if rank == 1 else None
    seen["scatter"] = pydist.scatter(blocks, root=1, out=torch.empty(1)).tolist()
    seen["all_to_all"] = pydist.all_to_all(torch.arange(size) + 10 * rank).tolist()
    ragged = [torch.full((r + 1,), rank) for r in range(size)]
    parts = [torch.empty(rank + 1, dtype=torch.int64) for _ in range(size)]
    seen["ragged"] = [part.tolist() for part in pydist.all_to_all(ragged, out=parts)]
    if rank == 0:
        for peer in range(1, size):
            pydist.send(torch.tensor([peer]), peer, tag=5)
    else:
        got = torch.empty(1, dtype=torch.int64)
        seen["recv"] = (pydist.recv(got, tag=5), got.item())
    pydist.barrier()
    return seen


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_every_collective_makes_its_output(backend: str) -> None:
    size = 3
    values = run_ranks(every_collective, size, env={"PYDIST_BACKEND": backend})
    for rank, seen in enumerate(values):
        assert seen["all_reduce"] == [3.0, 3.0]
        assert seen["premul_sum"] == [5.0, 3.0]
        assert seen["reduce_scatter"] == [[3.0, 3.0]]
        assert seen["reduce_scatter of a list"] == [float(rank)] * 3
        assert seen["all_gather"] == [0.0, 1.0, 1.0, 1.0, 2.0, 1.0]
        assert seen["all_gather of a scalar"] == [0, 1, 2]
        assert seen["broadcast"] == [1.0, 1.0]
        assert seen["reduce"] == ([3.0, 3.0] if rank == 1 else None)
        assert seen["gather"] == ([0.0, 1.0, 1.0, 1.0, 2.0, 1.0] if rank == 1 else None)
        assert seen["scatter"] == [float(rank)]
        assert seen["all_to_all"] == [rank, 10 + rank, 20 + rank]
        assert seen["ragged"] == [[r] * (rank + 1) for r in range(size)]
        assert seen.get("recv") == (None if rank == 0 else (0, rank))


def asynchronous() -> list[Any]:
    pydist.init()
    rank, size = pydist.rank(), pydist.world_size()
    t = torch.full((5,), float(rank))
    out = torch.empty(5)
    everything = torch.empty(5 * size)
    works = [
        pydist.all_reduce(t, out=out, async_op=True),
        pydist.all_gather(t, out=everything, async_op=True),
        pydist.barrier(async_op=True),
    ]
    for work in works:
        assert isinstance(work, pydist.Work)
        work.wait(timeout=20)
        assert work.is_completed()
        assert work.exception() is None
    peer = (rank + 1) % size
    got = torch.empty(1)
    receive = pydist.recv(got, async_op=True, tag=3)
    send = pydist.send(torch.tensor([float(rank)]), peer, tag=3, async_op=True)
    receive.wait()
    send.wait()
    return [out.tolist(), everything.tolist(), got.item(), receive.source_rank]


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_async_op_gives_work(backend: str) -> None:
    for rank, value in enumerate(run_ranks(asynchronous, 2, env={"PYDIST_BACKEND": backend})):
        peer = 1 - rank
        assert value == [[1.0] * 5, [0.0] * 5 + [1.0] * 5, float(peer), peer]


def numpy_arrays() -> list[Any]:
    pydist.init()
    rank, size = pydist.rank(), pydist.world_size()
    array = np.full((2, 3), rank, dtype=np.float32)
    address = array.ctypes.data
    result = pydist.all_reduce(array)
    assert result is array
    assert array.ctypes.data == address
    transposed = np.arange(6, dtype=np.int64).reshape(2, 3).T
    pydist.all_reduce(transposed, "max")
    assert transposed.tolist() == np.arange(6).reshape(2, 3).T.tolist()
    gathered = pydist.all_gather(np.array([rank, rank], dtype=np.int16))
    assert isinstance(gathered, np.ndarray)
    assert gathered.dtype == np.int16
    block = pydist.reduce_scatter(np.ones(2 * size))
    assert isinstance(block, np.ndarray)
    reduced = pydist.reduce(np.array([True, rank == 0]), op="band")
    empty = pydist.all_reduce(np.zeros(0, dtype=np.float64))
    return [
        array.tolist(),
        gathered.tolist(),
        block.tolist(),
        None if reduced is None else reduced.tolist(),
        empty.shape,
    ]


def test_numpy_arrays_are_used_in_place() -> None:
    values = run_ranks(numpy_arrays, 2)
    common = [[[1.0] * 3] * 2, [0, 0, 1, 1], [2.0, 2.0]]
    assert values[0] == [*common, [True, False], (0,)]
    assert values[1] == [*common, None, (0,)]


@pytest.mark.usefixtures("alone")
class TestRefusals:
    """What is wrong with a call is said before anything is sent."""

    @pytest.mark.parametrize(
        ("value", "said"),
        [
            (np.float32(1), "is a float32 .a numpy scalar has no memory of its own."),
            ([1.0], "is a list"),
            (3, "is an int"),
            (None, "is None;"),
            (np.array(["text"]), "which torch can't read in place"),
            (np.zeros(4)[::-1], "which torch can't read in place"),
            (np.zeros(4, dtype=">f4"), "which torch can't read in place"),
        ],
    )
    def test_not_a_tensor(self, value: object, said: str) -> None:
        with pytest.raises(pydist.InvalidUsage, match=said):
            pydist.all_reduce(value)  # type: ignore[type-var]

    def test_a_read_only_array(self) -> None:
        array = np.zeros(3)
        array.flags.writeable = False
        with pytest.raises(pydist.InvalidUsage, match=r"read-only.*copy\(\)"):
            pydist.all_reduce(array)

    def test_factor_and_premul_sum_belong_together(self) -> None:
        with pytest.raises(pydist.InvalidUsage, match="needs factor="):
            pydist.all_reduce(torch.ones(1), "premul_sum")
        with pytest.raises(pydist.InvalidUsage, match="goes with"):
            pydist.all_reduce(torch.ones(1), "sum", factor=2.0)

    def test_an_unknown_op(self) -> None:
        with pytest.raises(pydist.InvalidUsage, match="median"):
            pydist.all_reduce(torch.ones(1), "median")

    def test_something_else_as_an_op(self) -> None:
        for op in (None, 3, torch.distributed.ReduceOp.SUM):
            with pytest.raises(pydist.InvalidUsage, match=f"got a .*{type(op).__name__}"):
                pydist.all_reduce(torch.ones(1), op)  # type: ignore[call-overload]

    @pytest.mark.parametrize("tag", [-1, 2**63, 10**30])
    def test_a_tag_that_is_none(self, tag: int) -> None:
        with pytest.raises(pydist.InvalidUsage, match=rf"from 0 to 2\*\*63 - 1, got {tag}"):
            pydist.recv(torch.ones(1), tag=tag)

    @pytest.mark.parametrize(
        "call",
        [
            lambda t: pydist.all_gather(t, async_op=True),
            lambda t: pydist.gather(t, async_op=True),
            lambda t: pydist.reduce_scatter(t, async_op=True),
            lambda t: pydist.all_to_all(t, async_op=True),
        ],
    )
    def test_async_needs_an_output(self, call: Callable[[torch.Tensor], object]) -> None:
        with pytest.raises(pydist.InvalidUsage, match="needs out="):
            call(torch.ones(2))

    def test_shapes_that_do_not_divide(self) -> None:
        with pytest.raises(pydist.InvalidUsage, match="dimension 0"):
            pydist.reduce_scatter(torch.tensor(1.0))
        with pytest.raises(pydist.InvalidUsage, match="2 blocks; the group has 1 ranks"):
            pydist.reduce_scatter([torch.ones(1), torch.ones(1)])
        with pytest.raises(pydist.InvalidUsage, match="needs out="):
            pydist.all_to_all([torch.ones(1)])

    def test_a_root_without_blocks(self) -> None:
        with pytest.raises(pydist.InvalidUsage, match="rank 0 is the root"):
            pydist.scatter(None, out=torch.empty(1))

    def test_ranks_that_do_not_exist(self) -> None:
        with pytest.raises(pydist.InvalidUsage):
            pydist.broadcast(torch.ones(1), root=1)
        with pytest.raises(pydist.InvalidUsage):
            pydist.send(torch.ones(1), dst=1)
        with pytest.raises(pydist.InvalidUsage):
            pydist.recv(torch.ones(1), src=1)

    def test_something_else_as_a_group(self) -> None:
        with pytest.raises(pydist.InvalidUsage, match="group= is a list"):
            pydist.all_reduce(torch.ones(1), group=[0])  # type: ignore[call-overload]

    def test_the_group_is_sound_after_a_refusal(self) -> None:
        for _ in range(3):
            with pytest.raises(pydist.InvalidUsage):
                pydist.all_reduce(torch.ones(1), "median")
            assert pydist.all_reduce(torch.ones(1)) == 1


@pytest.mark.usefixtures("alone")
def test_symmetric_empty_takes_a_shape_as_torch_does() -> None:
    assert pydist.symmetric_empty(2, 3).shape == (2, 3)
    assert pydist.symmetric_empty((2, 3)).shape == (2, 3)
    assert pydist.symmetric_empty(torch.Size([4])).shape == (4,)
    assert pydist.symmetric_empty(0).numel() == 0
    assert pydist.symmetric_empty(()).shape == ()
    assert pydist.symmetric_empty(2, dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.usefixtures("alone")
def test_parameters_and_subclasses_are_tensors() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    assert pydist.broadcast(parameter) is parameter
    assert pydist.all_reduce(parameter) is parameter


@pytest.mark.usefixtures("alone")
def test_the_python_side_of_a_call_is_a_fraction_of_torchs() -> None:
    """What pydist.all_reduce adds to the binding's own call, beside what torch's call takes."""
    import timeit

    tensor = torch.ones(2)
    communicator = pydist.job.groups.communicator_of()

    def best(statement: Callable[[], object]) -> float:
        return min(timeit.repeat(statement, number=2000, repeat=15))

    ours = best(lambda: pydist.all_reduce(tensor))
    binding = best(lambda: communicator.all_reduce(tensor, tensor, "sum", False))
    torchs = best(lambda: dist.all_reduce(tensor))
    assert ours - binding < 0.5 * torchs, f"{ours=} {binding=} {torchs=} s for 2000 calls"


def call_something_else(ranks_differ: str, rank: int) -> None:
    if ranks_differ == "count":
        pydist.all_reduce(torch.ones(2 + rank))
    elif ranks_differ == "op":
        pydist.all_reduce(torch.ones(2), "sum" if rank else "max")
    elif ranks_differ == "kind" and rank:
        pydist.all_gather(torch.ones(2))
    elif ranks_differ == "wire dtype":
        tensor = torch.ones(2)
        pydist.job.groups.communicator_of().all_reduce(
            tensor, tensor, wire_dtype=torch.bfloat16 if rank else None
        )
    else:
        pydist.all_reduce(torch.ones(2, dtype=torch.float64 if rank else torch.float32))


def mismatched(ranks_differ: str) -> str:
    pydist.init(timeout=20)
    with pytest.raises(pydist.Mismatch) as caught:
        call_something_else(ranks_differ, pydist.rank())
    return str(caught.value)


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
@pytest.mark.parametrize("ranks_differ", ["count", "op", "kind", "dtype", "wire dtype"])
def test_ranks_that_disagree_all_get_mismatch(ranks_differ: str, backend: str) -> None:
    for message in run_ranks(mismatched, 2, ranks_differ, env={"PYDIST_BACKEND": backend}):
        assert "rank 0" in message
        assert "rank 1" in message
        assert ("travelling as bfloat16" in message) == (ranks_differ == "wire dtype")


def late_by_a_call() -> str:
    pydist.init()
    if pydist.rank() == 1:
        import time

        time.sleep(3)
        return ""
    with pytest.raises(pydist.Timeout) as caught:
        pydist.barrier(timeout=0.5)
    return str(caught.value)


def test_a_timeout_of_one_call_names_who_is_late() -> None:
    assert "rank 1" in run_ranks(late_by_a_call, 2)[0]


def use_default_group_of_pool(value: float) -> float:
    pydist.init()
    return float(pydist.all_reduce(torch.tensor([value])))


def test_a_pool_of_ranks_keeps_its_group_between_calls() -> None:
    with Ranks(2) as ranks:
        for value in (1.0, 2.0, 3.0):
            assert ranks.run(use_default_group_of_pool, value) == [2 * value] * 2
        ranks.run(pydist.shutdown)
        assert ranks.run(use_default_group_of_pool, 5.0) == [10.0] * 2
