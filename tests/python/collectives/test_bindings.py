"""pydist._native by itself: arguments, handles, errors, information. In this one process."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import run_command, run_ranks
from thorough import everyday
from torch._subclasses.fake_tensor import FakeTensorMode

import pydist
from pydist import _native
from pydist.config.variables import unknown_variables
from pydist.job.groups import communicator_of

pytestmark = pytest.mark.timeout(60)

KINDS = [
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
    "barrier",
]


def make(backend: str, name: str = "alone") -> _native.Communicator:
    if backend == "native":
        return _native.create_native(dist.HashStore(), 0, 1, name)
    return _native.create_gloo(
        dist.HashStore(), 0, 1, name, 20.0, lambda s, r, n, t: dist.ProcessGroupGloo(s, r, n, t)
    )


@pytest.fixture(params=["native", "gloo"])
def communicator(request: pytest.FixtureRequest) -> Iterator[_native.Communicator]:
    made = make(request.param)
    yield made
    made.shutdown()


def test_properties(communicator: _native.Communicator) -> None:
    assert (communicator.rank, communicator.size, communicator.name) == (0, 1, "alone")
    assert communicator.backend in ("native", "gloo")
    assert communicator.failure is None
    communicator.timeout = 2.5
    assert communicator.timeout == 2.5
    for wrong in (0.0, -1.0, float("nan")):
        with pytest.raises(pydist.InvalidUsage, match="more than 0"):
            communicator.timeout = wrong
    capabilities = communicator.capabilities()
    assert capabilities["backend"] == communicator.backend
    assert capabilities["devices"] == ["cpu"]
    assert isinstance(communicator.whereabouts(), list)


def devices_after_tracing() -> list[str]:
    with FakeTensorMode():
        torch.ones(2, device="cuda").sum()
    pydist.init()
    devices: list[str] = communicator_of().capabilities()["devices"]
    return devices


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tracing_for_a_gpu_makes_none_appear() -> None:
    assert run_ranks(devices_after_tracing, 1) == [["cpu"]]


def test_every_operation(communicator: _native.Communicator) -> None:
    tensor, output = torch.arange(4.0), torch.zeros(4)
    assert communicator.all_reduce(tensor, output, "sum", False) is None
    assert torch.equal(output, tensor)
    communicator.all_reduce(tensor, output, "premul_sum", False, 0.5, 5.0, "half")
    assert torch.equal(output, tensor / 2)
    for inputs in (tensor, [tensor], (tensor,)):
        output.zero_()
        communicator.reduce_scatter(inputs, output)
        assert torch.equal(output, tensor)
        output.zero_()
        communicator.scatter(inputs, output, 0)
        assert torch.equal(output, tensor)
        output.zero_()
        communicator.all_to_all(inputs, [output])
        assert torch.equal(output, tensor)
    communicator.all_gather(tensor, [output])
    communicator.gather(tensor, output, 0)
    communicator.reduce(tensor, output, 0, "max")
    communicator.broadcast(output, 0)
    assert torch.equal(output, tensor)
    communicator.barrier()
    communicator.barrier(timeout=3.0)


def test_asynchronous(communicator: _native.Communicator) -> None:
    tensor = torch.arange(6.0).reshape(2, 3).t()
    output = torch.zeros(2, 3).t()
    work = communicator.all_reduce(tensor, output, async_op=True)
    assert isinstance(work, _native.Work)
    work.wait()
    work.wait(timeout=1.0)
    assert work.is_completed()
    assert work.exception() is None
    assert work.source_rank == -1
    assert torch.equal(output, tensor)
    assert work.get_future().wait()[0] is output
    assert communicator.barrier(async_op=True).wait() is None
    with pytest.raises(pydist.InvalidUsage, match="more than 0"):
        work.wait(0)


def test_rejected_arguments(communicator: _native.Communicator) -> None:
    tensor = torch.ones(4)
    with pytest.raises(pydist.InvalidUsage, match="op='plus' is not valid; use one of: sum, mean"):
        communicator.all_reduce(tensor, tensor, "plus")
    with pytest.raises(pydist.InvalidUsage, match="root 1"):
        communicator.broadcast(tensor, 1)
    with pytest.raises(pydist.InvalidUsage, match="one dtype"):
        communicator.all_reduce(tensor, torch.ones(4, dtype=torch.int32))
    with pytest.raises(pydist.InvalidUsage, match="4 elements"):
        communicator.all_reduce(tensor, torch.ones(3))
    with pytest.raises(pydist.InvalidUsage, match="meta"):
        communicator.all_reduce(torch.empty(4, device="meta"), tensor)
    with pytest.raises(pydist.InvalidUsage, match="sparse"):
        communicator.all_reduce(tensor.to_sparse(), tensor)
    with pytest.raises(pydist.InvalidUsage, match="from 0 to"):
        communicator.recv(tensor, 0, -1)
    with pytest.raises(pydist.InvalidUsage, match="more than 0"):
        communicator.barrier(timeout=-1.0)
    for wrong in (None, 1.0, [1.0], "tensor"):
        with pytest.raises(TypeError):
            communicator.all_reduce(wrong, tensor)  # type: ignore[arg-type]
    # Nothing of this has harmed the group.
    communicator.all_reduce(tensor, tensor)


def test_errors_are_one_tree(communicator: _native.Communicator) -> None:
    with pytest.raises(ValueError, match="root 3"):
        communicator.broadcast(torch.ones(1), 3)
    with pytest.raises(RuntimeError, match="root 3"):
        communicator.broadcast(torch.ones(1), 3)
    communicator.abort("given up")
    with pytest.raises(pydist.Aborted, match="given up"):
        communicator.barrier()
    assert isinstance(communicator.failure, pydist.Aborted)


def test_supported(communicator: _native.Communicator) -> None:
    for kind in KINDS:
        assert communicator.why_unsupported(kind, "sum", torch.float32) == ""
    assert "float8" in communicator.why_unsupported("all_reduce", "sum", torch.float8_e5m2)
    assert communicator.why_unsupported("all_gather", "sum", torch.float8_e5m2) == ""
    with pytest.raises(pydist.InvalidUsage, match="all_reduce, reduce_scatter"):
        communicator.why_unsupported("everything", "sum", torch.float32)


def test_symmetric_memory_outlives_its_communicator(communicator: _native.Communicator) -> None:
    tensor = communicator.symmetric_empty([3, 4], torch.bfloat16)
    assert (tensor.shape, tensor.dtype) == ((3, 4), torch.bfloat16)
    assert tensor.data_ptr() % 64 == 0
    part = tensor[1]
    tensor.fill_(1.0)
    communicator.all_reduce(tensor, tensor)
    del tensor
    communicator.shutdown()
    gc.collect()
    assert part.sum().item() == 4.0
    with pytest.raises(pydist.InvalidUsage, match="extent"):
        make("gloo").symmetric_empty([-1], torch.float32)


def test_empty_symmetric_memory(communicator: _native.Communicator) -> None:
    assert communicator.symmetric_empty([0, 4], torch.float32).numel() == 0
    assert communicator.symmetric_empty([], torch.float32).numel() == 1


def test_shutdown_is_idempotent(communicator: _native.Communicator) -> None:
    communicator.shutdown()
    communicator.shutdown()
    with pytest.raises(pydist.InvalidUsage):
        communicator.barrier()


def test_split(communicator: _native.Communicator) -> None:
    child = communicator.split([0])
    assert child.name != communicator.name
    child.barrier()
    child.shutdown()
    communicator.barrier()


def test_many_threads(communicator: _native.Communicator) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                tensor = torch.ones(8)
                communicator.all_reduce(tensor, tensor)
                communicator.all_reduce(tensor, tensor, async_op=True).wait()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_tensors_live_as_long_as_the_operation_needs_them() -> None:
    communicator = make("native")
    works = []
    for _ in range(50):
        tensor = torch.ones(1000)
        works.append(communicator.all_reduce(tensor, tensor, async_op=True))
        del tensor
    for work in works:
        assert work.get_future().wait()[0].sum().item() == 1000.0


def test_references_are_balanced() -> None:
    communicator = make("native")
    tensor = torch.ones(4)
    before = sys.getrefcount(tensor)
    for _ in range(10):
        communicator.all_reduce(tensor, tensor)
        communicator.all_reduce(tensor, tensor, async_op=True).wait()
    gc.collect()
    assert sys.getrefcount(tensor) == before


def test_process_group_takes_a_communicator() -> None:
    communicator = make("native")
    group = _native.ProcessGroup(communicator, timedelta(seconds=7))
    assert communicator.timeout == 7.0
    assert group.communicator is communicator
    group.monitored_barrier(1.0)
    with pytest.raises(pydist.InvalidUsage, match="positive"):
        _native.ProcessGroup(communicator, timedelta(0))
    with pytest.raises(TypeError):
        _native.ProcessGroup(None, timedelta(1), 3)  # type: ignore[call-arg]
    del communicator
    gc.collect()
    group.communicator.barrier()
    group.shutdown()


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDIST_TIMEOUT", "12.5")
    monkeypatch.setenv("PYDIST_TIMOUT", "1")
    variables: dict[str, Any] = {name: rest for name, *rest in _native.environment_variables()}
    assert variables["PYDIST_TIMEOUT"][-1] == "12.5"
    assert variables["PYDIST_ALGORITHM"][1] == "auto"
    assert all(len(rest) == 4 and rest[2] for rest in variables.values())
    monkeypatch.setenv("PYDIST_BAKEND", "gloo")
    monkeypatch.setenv("NOT_PYDIST_LOG", "x")
    unknown = dict(unknown_variables())
    assert unknown["PYDIST_TIMOUT"] == "PYDIST_TIMEOUT"
    assert unknown["PYDIST_BAKEND"] == "PYDIST_BACKEND"
    assert not unknown.keys() & {"PYDIST_TIMEOUT", "NOT_PYDIST_LOG"}
    environment = _native.read_environment()
    assert environment.timeout == 12.5
    monkeypatch.setenv("PYDIST_ALGORITHM", "quick")
    with pytest.raises(pydist.InvalidUsage, match=r"PYDIST_ALGORITHM.*quick.*direct"):
        _native.read_environment()


@pytest.mark.parametrize("backend", everyday("native", thorough=("gloo",)))
def test_nothing_is_needed_at_exit(backend: str) -> None:
    """A script that ends amid everything ends at once, and quietly."""
    code = f"""
import sys, torch, torch.distributed as dist
sys.path[:0] = {[os.path.dirname(__file__), *sys.path]!r}
from test_bindings import make
communicator = make({backend!r})
tensor = torch.ones(4)
work = communicator.all_reduce(tensor, tensor, async_op=True)
future = work.get_future().then(lambda f: f.value())
child = communicator.split([0])
memory = communicator.symmetric_empty([4], torch.float32)
"""
    done = run_command([sys.executable, "-c", code], timeout=40)
    assert (done.returncode, done.stderr) == (0, "")
