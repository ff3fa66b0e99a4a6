"""The gloo communicator: what is its own, beside the suite that every backend passes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gloo_groups import make
from launch import Ranks
from thorough import everyday

import pydist

pytestmark = pytest.mark.timeout(60)

LIMIT_S = 40.0

Runner = Callable[..., list[Any]]

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

INTEGERS = [
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
]


@pytest.fixture(params=everyday(3, thorough=(1, 2)))
def run(request: pytest.FixtureRequest) -> Iterator[Runner]:
    with Ranks(request.param) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


@pytest.fixture
def run_two() -> Iterator[Runner]:
    with Ranks(2) as ranks:
        yield lambda function, *args: ranks.run(function, *args, timeout=LIMIT_S)


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """What the group should compute, in rank order and at least float32."""
    dtype = inputs[0].dtype
    if dtype == torch.bool:
        table = torch.stack([tensor.to(torch.uint8) for tensor in inputs])
        if op == "bxor":
            return (table.sum(0) % 2).bool()
        return (table.amin(0) if op in ("min", "prod", "band") else table.amax(0)).bool()
    if dtype.is_complex:
        wide = [tensor.to(torch.complex128) for tensor in inputs]
    elif dtype.is_floating_point:
        wide = [tensor.double() for tensor in inputs]
    else:
        wide = [tensor.to(torch.int64) for tensor in inputs]
    result = wide[0].clone()
    for tensor in wide[1:]:
        if op in ("sum", "mean", "premul_sum"):
            result = result + tensor
        elif op == "prod":
            result = result * tensor
        elif op == "min":
            result = torch.minimum(result, tensor)
        elif op == "max":
            result = torch.maximum(result, tensor)
        elif op == "band":
            result = result & tensor
        elif op == "bor":
            result = result | tensor
        else:
            result = result ^ tensor
    if op == "mean":
        result = result / len(inputs)
    if op == "premul_sum":
        result = result * 0.5
    return result.to(dtype)


def every_operator() -> None:
    communicator = make()
    ops = ["sum", "mean", "avg", "min", "max", "prod", "band", "bor", "bxor", "premul_sum"]
    checked = 0
    for dtype in [*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128]:
        inputs = []
        for rank in range(communicator.size):
            generator = torch.Generator().manual_seed(rank)
            small = torch.randint(0, 2 if dtype == torch.bool else 5, (33,), generator=generator)
            inputs.append(small.to(dtype))
        for op in ops:
            name = "mean" if op == "avg" else op
            why = communicator.why_unsupported("all_reduce", op, dtype)
            output = torch.empty_like(inputs[0])
            if why:
                with pytest.raises(pydist.InvalidUsage, match="not defined"):
                    communicator.all_reduce(inputs[communicator.rank], output, op)
                continue
            communicator.all_reduce(inputs[communicator.rank], output, op, factor=0.5)
            expected = reduced(inputs, name)
            assert torch.allclose(
                output.to(torch.complex128), expected.to(torch.complex128), rtol=1e-6
            ), (dtype, op)
            checked += 1
    assert checked > 100
    communicator.shutdown()


def test_every_operator_and_type(run: Runner) -> None:
    run(every_operator)


def numerics() -> None:
    communicator = make()
    size = communicator.size
    # 256 + 1 is lost in bfloat16, but not in the float32 sum of them all.
    tensor = torch.tensor([256.0 if communicator.rank == 0 else 1.0]).bfloat16()
    communicator.all_reduce(tensor, tensor)
    assert tensor.item() == torch.tensor(256.0 + size - 1).bfloat16().item()
    # Would overflow float16 without the wider sum.
    tensor = torch.full((3,), 60000.0).half()
    communicator.all_reduce(tensor, tensor, "mean")
    assert tensor.tolist() == [torch.tensor(60000.0).half().item()] * 3
    for op in ("min", "max"):
        tensor = torch.ones(4)
        if communicator.rank == size - 1:
            tensor[2] = float("nan")
        communicator.all_reduce(tensor, tensor, op)
        assert tensor.isnan().tolist() == [False, False, True, False]
    # Longer than one chunk of a gathered reduction.
    tensor = torch.full((3_000_001,), communicator.rank + 1, dtype=torch.int16)
    communicator.all_reduce(tensor, tensor)
    assert bool((tensor == size * (size + 1) // 2).all())
    source = torch.ones(5)
    communicator.reduce(source, torch.empty(5) if communicator.rank == 0 else None, 0)
    assert source.tolist() == [1.0] * 5
    communicator.shutdown()


def test_numerics(run: Runner) -> None:
    run(numerics)


def ragged() -> None:
    communicator = make()
    rank, size = communicator.rank, communicator.size
    ranks = range(size)
    for dtype in (torch.float32, torch.float8_e5m2):
        outputs = [torch.empty(2 * r, dtype=dtype) for r in ranks]
        communicator.all_gather(torch.full((2 * rank,), float(rank)).to(dtype), outputs)
        assert all(
            bool((output.float() == r).all()) for r, output in zip(ranks, outputs, strict=True)
        )
        root = size - 1
        gathered = [torch.empty(r, dtype=dtype) for r in ranks] if rank == root else None
        communicator.gather(torch.full((rank,), float(rank)).to(dtype), gathered, root)
        if gathered is not None:
            assert all(
                bool((output.float() == r).all()) for r, output in zip(ranks, gathered, strict=True)
            )
        parts = [torch.full((r + 1,), float(r)).to(dtype) for r in ranks] if rank == 0 else None
        part = torch.empty(rank + 1, dtype=dtype)
        communicator.scatter(parts, part, 0)
        assert bool((part.float() == rank).all())
        outputs = [torch.empty(r * rank, dtype=dtype) for r in ranks]
        communicator.all_to_all(
            [torch.full((r * rank,), float(rank)).to(dtype) for r in ranks], outputs
        )
        assert all(
            bool((output.float() == r).all()) for r, output in zip(ranks, outputs, strict=True)
        )
    block = torch.empty(rank + 1)
    communicator.reduce_scatter([torch.full((r + 1,), float(r)) for r in ranks], block, "mean")
    assert block.tolist() == [float(rank)] * (rank + 1)
    communicator.shutdown()


def test_ragged(run: Runner) -> None:
    run(ragged)


def in_place() -> None:
    communicator = make()
    rank, size = communicator.rank, communicator.size
    whole = torch.zeros(3 * size)
    whole[3 * rank : 3 * rank + 3] = rank
    communicator.all_gather(whole[3 * rank : 3 * rank + 3], whole)
    assert whole.tolist() == [float(r) for r in range(size) for _ in range(3)]
    block = whole[3 * rank : 3 * rank + 3]
    communicator.reduce_scatter(whole, block)
    assert block.tolist() == [float(rank * size)] * 3
    tensor = torch.arange(2.0 * size)
    communicator.all_to_all(tensor, tensor)
    assert tensor.tolist() == [2.0 * rank, 2.0 * rank + 1] * size
    communicator.shutdown()


def test_in_place(run: Runner) -> None:
    run(in_place)


def messages() -> None:
    communicator = make()
    rank = communicator.rank
    peer = 1 - rank
    # Crossed, in another order of tags on either side.
    received = {tag: torch.empty(4) for tag in (1, 2, 3)}
    works = [
        communicator.recv(received[tag], peer, tag, async_op=True)
        for tag in (received if rank == 0 else reversed(received))
    ]
    for tag in (3, 1, 2):
        works.append(communicator.send(torch.full((4,), float(tag)), peer, tag, async_op=True))
    for work in works:
        work.wait(20.0)
    assert [tensor[0].item() for tensor in received.values()] == [1.0, 2.0, 3.0]
    # Handles that nobody keeps, and an empty message.
    for _ in range(10):
        communicator.send(torch.full((1000,), float(rank)), peer, 9, async_op=True)
    communicator.send(torch.empty(0), peer, 10, async_op=True)
    for _ in range(10):
        tensor = torch.empty(1000)
        assert communicator.recv(tensor, -1, 9) == peer
        assert tensor[999].item() == peer
    assert communicator.recv(torch.empty(0), peer, 10) == peer
    late = communicator.recv(torch.empty(1), peer, 11, async_op=True)
    with pytest.raises(pydist.Timeout):
        late.wait(0.05)
    assert not late.is_completed()
    communicator.barrier()
    communicator.send(torch.ones(1), peer, 11)
    late.wait()
    assert (late.is_completed(), late.exception(), late.source_rank) == (True, None, peer)
    with pytest.raises(pydist.InvalidUsage, match="itself"):
        communicator.send(torch.ones(1), rank)
    with pytest.raises(pydist.InvalidUsage, match="tags"):
        communicator.send(torch.ones(1), peer, 2**31)
    communicator.shutdown()


def test_messages(run_two: Runner) -> None:
    run_two(messages)


def asynchronous() -> None:
    communicator = make()
    size = communicator.size
    tensors = [torch.full((n,), 1.0) for n in (0, 1, 1000, 100_000)]
    works = [communicator.all_reduce(tensor, tensor, "sum", True) for tensor in tensors]
    # A call that waits takes its turn behind those under way.
    last = torch.ones(1)
    communicator.all_reduce(last, last)
    assert all(work.is_completed() for work in works)
    assert all(bool((tensor == size).all()) for tensor in [*tensors, last])
    matrix = torch.ones(4, 3).t()
    future = communicator.all_reduce(matrix, matrix, async_op=True).get_future()
    assert torch.equal(future.wait()[0], torch.full((3, 4), float(size)))
    communicator.shutdown()
    with pytest.raises(pydist.InvalidUsage, match="shut down"):
        communicator.barrier()


def test_asynchronous(run: Runner) -> None:
    run(asynchronous)


def splits() -> list[str]:
    communicator = make()
    rank, size = communicator.rank, communicator.size
    reverse = communicator.split(list(range(size))[::-1])
    assert reverse.rank == size - 1 - rank
    alone = communicator.split([rank])
    assert (alone.rank, alone.size) == (0, 1)
    again = communicator.split(list(range(size))[::-1])
    tensor = torch.tensor([float(reverse.rank)])
    again.broadcast(tensor, 0)
    assert tensor.item() == 0.0
    for ranks in ([rank, rank], [rank, size], [size]):
        with pytest.raises(pydist.InvalidUsage):
            communicator.split(ranks)
    names = [group.name for group in (communicator, reverse, again)]
    assert len(set(names)) == 3
    return names


def test_splits(run: Runner) -> None:
    names = run(splits)
    assert all(each == names[0] for each in names)
