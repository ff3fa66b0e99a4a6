"""`pydist.testing.faults`: what is armed strikes where it says, once, and leaves nothing."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Ranks, run_command

import pydist
from pydist.job import phases
from pydist.testing import faults
from pydist.testing.faults import Fault

pytestmark = pytest.mark.timeout(90)


@pytest.fixture
def alone() -> Iterator[None]:
    pydist.init()
    yield
    pydist.shutdown()


def take_part(number: int = 1) -> None:
    for _ in range(number):
        pydist.all_reduce(torch.ones(1))


def small_model() -> tuple[pydist.DataParallel, torch.optim.Optimizer]:
    layers = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)]
    model = pydist.DataParallel(torch.nn.Sequential(*layers))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def train(model: pydist.DataParallel, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.usefixtures("alone")
def test_a_model_that_is_frozen_runs() -> None:
    model, _ = small_model()
    model.requires_grad_(False)
    with faults.inject(Fault("raise", phase="step")), torch.no_grad():
        model(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"action": "explode", "phase": "step"}, "action='explode' is not known"),
        ({"action": "kill"}, "a fault needs a place"),
        ({"action": "kill", "phase": "step", "operation": "barrier"}, "a fault needs a place"),
        ({"action": "kill", "phase": "lunch"}, "phase='lunch' is not known"),
        ({"action": "kill", "operation": "all"}, "operation='all' is not known"),
        ({"action": "kill", "phase": "step", "number": 2}, "number=2 counts operations"),
        ({"action": "kill", "phase": "step", "step": 0}, "whole number >= 1"),
        ({"action": "kill", "phase": "step", "rank": True}, "whole number >= 0"),
        ({"action": "kill", "phase": "step", "seconds": -1.0}, "must be 0 or more"),
        ({"action": "delay", "phase": "step"}, "needs seconds="),
        ({"action": "raise", "phase": "step", "seconds": 1.0}, "seconds= goes with"),
        ({"action": "exhaust-threads", "phase": "step", "spare": 1}, "spare= goes with"),
        ({"action": "kill", "phase": "step", "error": ValueError()}, "error= goes with raise"),
        ({"action": "corrupt", "operation": "barrier"}, "no data to corrupt"),
        ({"action": "corrupt", "phase": "start-up"}, "no data to corrupt"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(pydist.InvalidUsage, match=said):
        Fault(**values)


def test_faults_are_read_from_text() -> None:
    read = faults.parse(
        "kill rank=1 step=3 phase=backward ; delay operation=all_reduce number=2 seconds=0.5;"
    )
    assert read == [
        Fault("kill", rank=1, step=3, phase="backward"),
        Fault("delay", operation="all_reduce", number=2, seconds=0.5),
    ]


@pytest.mark.parametrize(
    "text", ["kill", "kill rank", "kill phase=step rank=one", "kill phase=step phase=step"]
)
def test_text_that_is_no_fault_is_named(text: str) -> None:
    with pytest.raises(pydist.InvalidUsage, match=f"PYDIST_FAULTS: in '{text}'"):
        faults.parse(text)


@pytest.mark.usefixtures("alone")
class TestInOneProcess:
    """What can be seen without other ranks."""

    def test_an_operation_is_counted_by_name(self) -> None:
        with faults.inject(Fault("raise", operation="all_reduce", number=2)):
            pydist.barrier()
            take_part()
            with pytest.raises(faults.InjectedError, match="all_reduce number 2 on rank 0"):
                take_part()
            take_part(2)

    def test_another_rank_is_not_struck(self) -> None:
        with faults.inject(Fault("raise", rank=1, operation="all_reduce")):
            take_part()

    def test_it_strikes_as_often_as_it_says(self) -> None:
        with faults.inject(Fault("raise", operation="barrier", times=2, error=KeyError("mine"))):
            for _ in range(2):
                with pytest.raises(KeyError, match="mine"):
                    pydist.barrier()
            pydist.barrier()

    def test_nothing_is_left(self) -> None:
        before = pydist.Communicator.all_reduce
        with faults.inject(Fault("kill", phase="step")):
            assert phases.listener is not None
        assert pydist.Communicator.all_reduce is before
        assert phases.listener is None
        with faults.inject():
            pass

    def test_two_at_a_time_are_refused(self) -> None:
        with (
            faults.inject(),
            pytest.raises(pydist.InvalidUsage, match="armed already"),
            faults.inject(),
        ):
            pass

    def test_a_delay_takes_its_time(self) -> None:
        with faults.inject(Fault("delay", operation="barrier", seconds=0.2)):
            began = time.monotonic()
            pydist.barrier()
            assert time.monotonic() - began >= 0.2

    @pytest.mark.parametrize("phase", ["forward", "backward", "step"])
    def test_a_phase_of_a_step(self, phase: str) -> None:
        model, optimizer = small_model()
        with faults.inject(Fault("raise", step=3, phase=phase)):
            train(model, optimizer, 2)
            with pytest.raises(faults.InjectedError, match=f"step 3, {phase}"):
                train(model, optimizer, 1)
        train(model, optimizer, 1)

    def test_a_second_optimizer_does_not_count_steps(self) -> None:
        model, optimizer = small_model()
        other = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
        with faults.inject(Fault("raise", step=3, phase="step")):
            for _ in range(2):
                train(model, optimizer, 1)
                other.step()
            with pytest.raises(faults.InjectedError):
                train(model, optimizer, 1)

    def test_corrupted_data(self) -> None:
        with faults.inject(Fault("corrupt", operation="all_reduce", times=2)):
            assert pydist.all_reduce(torch.ones(2))[0].isnan()
            assert pydist.all_reduce(torch.ones(2, dtype=torch.int64)).tolist() == [~1, 1]

    def test_a_corrupted_gradient(self) -> None:
        model, optimizer = small_model()
        with faults.inject(Fault("corrupt", step=2, phase="backward")):
            train(model, optimizer, 1)
            assert not any(each.isnan().any() for each in model.parameters())
            train(model, optimizer, 1)
            assert any(each.isnan().any() for each in model.parameters())

    @pytest.mark.parametrize("phase", ["forward", "step"])
    def test_a_corrupted_parameter(self, phase: str) -> None:
        model, optimizer = small_model()
        optimizer.param_groups[0]["lr"] = 0.0
        first = next(model.parameters())
        before = first.detach().clone()
        with faults.inject(Fault("corrupt", phase=phase)):
            train(model, optimizer, 2)
        # The difference of two rounded float32 numbers.
        assert (first - before).flatten().tolist() == pytest.approx([1, 0, 0, 0], abs=1e-6)

    def test_a_corrupted_checkpoint_is_not_loaded(self, tmp_path: Path) -> None:
        model, _ = small_model()
        with faults.inject(Fault("corrupt", phase="checkpoint")):
            pydist.save(tmp_path / "c", model=model)
        with pytest.raises(pydist.CheckpointError):
            pydist.load(tmp_path / "c", model=model)

    def test_exhaustion_ends_with_the_block(self) -> None:
        with faults.inject(Fault("exhaust-descriptors", operation="barrier", spare=1)):
            pydist.barrier()
            with open("/dev/null"), pytest.raises(OSError, match="Too many open files"):
                os.open("/dev/zero", os.O_RDONLY)
        with open("/dev/null"), open("/dev/zero"):
            pass


def test_no_thread_can_start() -> None:
    with faults.exhausted("threads"), pytest.raises(RuntimeError, match="start new thread"):
        threading.Thread(target=int).start()
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()


def test_no_memory_is_left() -> None:
    with faults.exhausted("memory", spare=1 << 20), pytest.raises(MemoryError):
        bytearray(1 << 28)
    assert len(bytearray(1 << 28)) == 1 << 28


@pytest.mark.parametrize("what", ["threads", "nerves"])
def test_what_can_not_be_exhausted_is_refused(what: Any) -> None:
    with pytest.raises(pydist.InvalidUsage, match=what), faults.exhausted(what, spare=1):
        pass


def be_killed(seconds: float) -> str:
    pydist.init(timeout=30)
    with faults.inject(Fault("kill", rank=1, operation="recv", seconds=seconds)):
        try:
            pydist.recv(torch.ones(1), 1 - pydist.rank())
        except pydist.PeerLost as error:
            return str(error)
    return "nothing"


@pytest.mark.parametrize("seconds", [0.0, 0.3], ids=["before", "within"])
def test_a_killed_rank_is_named_by_the_other(seconds: float) -> None:
    with Ranks(2) as ranks:
        first, second = ranks.outcomes(be_killed, seconds)
    assert second.exit_code == -signal.SIGKILL
    assert first.ok
    assert "rank 1 " in first.value


def be_stopped() -> bool:
    pydist.init()
    pid = os.getpid()
    # Forked before the faults are armed: continues this process, which can't do that itself.
    child = os.fork()
    if child == 0:
        for _ in range(100):
            time.sleep(0.05)
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                os.kill(pid, signal.SIGCONT)
                os._exit(0)
        os._exit(1)
    with faults.inject(Fault("stop", operation="barrier")):
        pydist.barrier()
    return os.waitpid(child, 0)[1] == 0


def test_a_stopped_rank_stands_still() -> None:
    with Ranks(1) as ranks:
        assert ranks.run(be_stopped) == [True]


def test_a_variable_that_is_no_fault_ends_the_import(tmp_path: Path) -> None:
    done = run_command(
        [sys.executable, "-c", "import pydist"], env={"PYDIST_FAULTS": "explode phase=step"}
    )
    assert done.returncode == 1
    assert "PYDIST_FAULTS: in 'explode phase=step': action='explode' is not known" in done.stderr


def test_nothing_is_loaded_without_faults() -> None:
    code = "import sys, pydist; assert 'pydist.testing.faults' not in sys.modules"
    assert run_command([sys.executable, "-c", code]).returncode == 0
