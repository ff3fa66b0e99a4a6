"""What goes wrong in the drills. An act runs on every rank, which has joined the job."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from scene import Scene

import pydist
from pydist.testing import faults
from pydist.testing.exhaustion import Resource


def small(number: int = 1) -> None:
    """Collectives of a few bytes."""
    for _ in range(number):
        pydist.all_reduce(torch.ones(2))


def model_of(width: int = 8) -> tuple[pydist.DataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    model = pydist.DataParallel(torch.nn.Sequential(*layers))
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def train(model: pydist.DataParallel, optimizer: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()


# -- killed


def killed_at_start_up(scene: Scene) -> None:
    """The launcher's job is known to the rank, its group not yet made."""
    with faults.inject(faults.Fault("delay", rank=scene.victim, phase="start-up", seconds=30.0)):
        if scene.is_victim:
            scene.die_soon(0.2)
        pydist.init(timeout=scene.timeout_s)


def killed_before_a_collective(scene: Scene) -> None:
    small(3)
    if scene.is_victim:
        time.sleep(0.1)
        scene.die()
    small()


def killed_in_a_collective(scene: Scene) -> None:
    large = torch.ones(1 << 20)
    if scene.is_victim:
        scene.die_soon(0.2)
    while True:
        pydist.all_reduce(large)


def killed_before_all_have_come(scene: Scene) -> None:
    """Rank 1 comes to the collective once the others have given it up."""
    small(3)
    given_up = scene.folder / "given-up"
    if scene.is_victim:
        scene.die_soon(0.2)
    if scene.rank == 1:
        scene.wait_for(given_up)
    try:
        small()
    except pydist.Error:
        given_up.touch()
        raise


def killed_after_a_collective(scene: Scene) -> None:
    small(3)
    if scene.is_victim:
        scene.die()
    time.sleep(0.1)
    small()


class Numbers(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> int:
        return index


def killed_with_live_workers(scene: Scene) -> None:
    if scene.is_victim:
        # Ranks of tests are daemons, which Python lets start no processes.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        loader = torch.utils.data.DataLoader(
            Numbers(), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        batches = iter(loader)
        next(batches)
        small()
        scene.die()
    small(2)


def killed_in_backward(scene: Scene) -> None:
    model, optimizer = model_of()
    train(model, optimizer, 2)
    if scene.is_victim:
        list(model.parameters())[4].register_hook(lambda _: scene.die())
    train(model, optimizer)


def killed_in_a_checkpoint(scene: Scene) -> None:
    model, _ = model_of()
    path = scene.folder / "checkpoint"
    pydist.save(path, model=model, extra=1)
    with faults.inject(faults.Fault("delay", rank=scene.victim, phase="checkpoint", seconds=30.0)):
        if scene.is_victim:
            scene.die_soon(0.3)
        pydist.save(path, model=model, extra=2)


def rank_0_killed(scene: Scene) -> None:
    small(3)
    if scene.rank == 0:
        time.sleep(0.1)
        scene.die()
    small()


def server_of_the_store_killed(scene: Scene) -> None:
    """Rank 0 serves it, and leaves a child that holds its sockets."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    place = scene.folder / "port"
    if scene.rank == 0:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place.with_suffix(".part").write_text(str(port))
        place.with_suffix(".part").rename(place)
    scene.wait_for(place)
    os.environ["MASTER_PORT"] = place.read_text()
    pydist.init(timeout=scene.timeout_s)
    small(3)
    if scene.rank == 0:
        if (child := os.fork()) == 0:
            time.sleep(20.0)
            os._exit(0)
        (scene.folder / "child").write_text(str(child))
        time.sleep(0.1)
        scene.die()
    try:
        small(2)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((scene.folder / "child").read_text()), signal.SIGKILL)


def left_before_a_group_is_made(scene: Scene) -> None:
    small()
    if scene.is_victim:
        scene.mark()
        pydist.shutdown()
        return
    pydist.new_group(range(scene.size))


def left_without_shutdown(scene: Scene) -> None:
    small()
    if scene.is_victim:
        scene.mark()
        os._exit(0)
    small()


# -- stopped


def stopped_in_a_collective(scene: Scene) -> None:
    small()
    if scene.is_victim:
        scene.die(signal.SIGSTOP)
    small()


def stopped_behind_receives(scene: Scene) -> None:
    """Each rank waits for the next one's message, and the first of them waits longest."""
    small()
    if scene.is_victim:
        scene.die(signal.SIGSTOP)
    time.sleep(0.1 * scene.rank)
    pydist.recv(torch.empty(2), scene.rank + 1)


def stopped_behind_makers_of_groups(scene: Scene) -> None:
    """Rank 0, with which the others make groups, waits for the stopped one."""
    small()
    if scene.is_victim:
        scene.die(signal.SIGSTOP)
    if scene.rank == 0:
        time.sleep(0.3)
        pydist.recv(torch.empty(2), scene.victim)
    else:
        pydist.new_group([0, scene.rank])


def rank_0_stopped_before_a_group_is_made(scene: Scene) -> None:
    small()
    if scene.rank == 0:
        scene.die(signal.SIGSTOP)
    pydist.new_group(range(scene.size))


def rank_0_stopped_while_a_group_is_made(scene: Scene) -> None:
    small()
    if scene.is_victim:
        scene.wait_for(scene.folder / "making")
        time.sleep(0.3)
        os.kill(int((scene.folder / "making").read_text()), signal.SIGSTOP)
        scene.mark()
    elif scene.rank == 0:
        (scene.folder / "making.part").write_text(str(os.getpid()))
        (scene.folder / "making.part").rename(scene.folder / "making")
    pydist.new_group(range(scene.size))


def stopped_and_continued(scene: Scene) -> None:
    small()
    if scene.is_victim:
        pid = os.getpid()
        if os.fork() == 0:
            time.sleep(0.5)
            os.kill(pid, signal.SIGCONT)
            os._exit(0)
        scene.die(signal.SIGSTOP)
        os.wait()
    small()


# -- disagreeing


def one_step_behind(scene: Scene) -> None:
    model, optimizer = model_of()
    train(model, optimizer, 2)
    if not scene.is_victim:
        train(model, optimizer)
    else:
        scene.mark()
    pydist.barrier()
    pydist.all_reduce(torch.ones(3))


def another_model(scene: Scene) -> None:
    if scene.is_victim:
        scene.mark()
    model_of(9 if scene.is_victim else 8)


def another_dtype(scene: Scene) -> None:
    small()
    if scene.is_victim:
        scene.mark()
    pydist.all_reduce(torch.ones(4, dtype=torch.float64 if scene.is_victim else torch.float32))


def another_count(scene: Scene) -> None:
    small()
    if scene.is_victim:
        scene.mark()
    pydist.all_reduce(torch.ones(5 if scene.is_victim else 4))


def another_op(scene: Scene) -> None:
    small()
    if scene.is_victim:
        scene.mark()
    pydist.all_reduce(torch.ones(4), "max" if scene.is_victim else "sum")


def another_order(scene: Scene) -> None:
    small()
    if scene.is_victim:
        scene.mark()
        pydist.barrier()
        small()
    else:
        small()
        pydist.barrier()


# -- raising


class BrokenError(RuntimeError):
    """The program's own."""


def leaving_as(act: Any) -> None:
    """Does what Python does with a script that raises: it tells of the exception, and ends."""
    try:
        act()
    except BrokenError as error:
        sys.excepthook(type(error), error, error.__traceback__)
        pydist.shutdown()


def raised_in_forward(scene: Scene) -> None:
    model, optimizer = model_of()
    train(model, optimizer)

    def fail(*_: Any) -> None:
        scene.mark()
        raise BrokenError("no such sample")

    if scene.is_victim:
        model.register_forward_pre_hook(fail)
        leaving_as(lambda: train(model, optimizer))
    else:
        train(model, optimizer)


def raised_in_backward(scene: Scene) -> None:
    model, optimizer = model_of()
    train(model, optimizer)

    def fail(_: torch.Tensor) -> None:
        scene.mark()
        raise BrokenError("no such sample")

    if scene.is_victim:
        list(model.parameters())[4].register_hook(fail)
        leaving_as(lambda: train(model, optimizer))
    else:
        train(model, optimizer)


def raised_in_a_loader(scene: Scene) -> None:
    model, optimizer = model_of()

    def batches() -> Iterator[None]:
        for number in range(4):
            if number == 2 and scene.is_victim:
                scene.mark()
                raise BrokenError("no such sample")
            yield

    def run() -> None:
        for _ in batches():
            train(model, optimizer)

    if scene.is_victim:
        leaving_as(run)
    else:
        run()


# -- what a program may not do, or may


def collective_from_another_thread(scene: Scene) -> None:
    """All ranks alike: that is allowed."""
    scene.mark()
    thread = threading.Thread(target=small, args=(3,))
    thread.start()
    thread.join()
    small()


def forked_after_init(scene: Scene) -> None:
    small()
    scene.mark()
    child = os.fork()
    if child == 0:
        try:
            pydist.all_reduce(torch.ones(1))
        except pydist.InvalidUsage:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    small()


def joined_twice(scene: Scene) -> None:
    scene.mark()
    pydist.init()
    small()


def joined_twice_otherwise(scene: Scene) -> None:
    scene.mark()
    pydist.init(timeout=77)


def _start_up_without(scene: Scene, what: Resource, spare: int) -> None:
    if scene.is_victim:
        scene.mark()
        with faults.exhausted(what, spare=spare):
            pydist.init(timeout=scene.timeout_s)
    else:
        pydist.init(timeout=scene.timeout_s)


def no_descriptors_at_start_up(scene: Scene) -> None:
    _start_up_without(scene, "descriptors", 4)


def no_threads_at_start_up(scene: Scene) -> None:
    _start_up_without(scene, "threads", 0)


def no_address_space_at_start_up(scene: Scene) -> None:
    _start_up_without(scene, "memory", 1 << 20)


def a_port_taken(scene: Scene) -> None:
    """Rank 0 is to serve the store, as without a launcher, where a stranger listens."""
    stranger = socket.socket()
    path = scene.folder / "port"
    if scene.is_victim:
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        scene.mark()
        part = path.with_suffix(".part")
        part.write_text(str(stranger.getsockname()[1]))
        part.rename(path)
    while not path.exists():
        time.sleep(0.001)
    os.environ["MASTER_PORT"] = path.read_text()
    serving = os.environ.pop("TORCHELASTIC_USE_AGENT_STORE")
    try:
        pydist.init(timeout=scene.timeout_s)
    finally:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = serving
        stranger.close()


def a_number_taken(scene: Scene) -> None:
    """Two processes claim to be one rank."""
    scene.mark()
    if scene.is_victim:
        os.environ["RANK"] = str(scene.rank - 1)
        time.sleep(1)  # so that it is the second
    pydist.init(timeout=scene.timeout_s)


def many_ranks(scene: Scene) -> None:
    """More than there are cores: they start, work, and end."""
    scene.mark()
    pydist.init(timeout=scene.timeout_s)
    for count in (1, 1000, 100_000):
        total = pydist.all_reduce(torch.full((count,), 1.0 + scene.rank))
        assert total[-1].item() == scene.size * (scene.size + 1) / 2
    pydist.barrier()


def no_address_space_left(scene: Scene) -> None:
    """For memory that all ranks share, which takes no descriptor."""
    small()
    if scene.is_victim:
        scene.mark()
        with faults.exhausted("memory", spare=16 << 20):
            pydist.symmetric_empty(1 << 24)
    else:
        pydist.symmetric_empty(1 << 24)


def started_and_ended_often(scene: Scene) -> None:
    """A hundred times, of which the first ten may still find memory of torch's own."""
    from belongings import belongings, resident_bytes

    scene.mark()
    small()
    counted = memory = None
    for cycle in range(100):
        pydist.shutdown()
        pydist.init(timeout=30)
        small()
        if cycle == 10:
            counted, memory = belongings(), resident_bytes()
    assert counted is not None
    assert memory is not None
    grown = belongings() - counted
    if grown:
        sys.exit(f"left behind in 90 cycles: {dict(grown)}")
    if resident_bytes() - memory > 8 << 20:
        sys.exit(f"grew by {resident_bytes() - memory} bytes in 90 cycles")
