"""The drills: what goes wrong in each, and what the other ranks have to read.

An act runs on every rank, which has joined the job. `DRILLS` says what has to come of it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import torch
from scene import Drill, Scene

import pydist
from pydist.testing import faults

LOST = ("PeerLost",)
# A rank that raised has told so.
TOLD = ("Aborted",)


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


def no_descriptors_at_start_up(scene: Scene) -> None:
    if scene.is_victim:
        scene.mark()
        with faults.exhausted("descriptors", spare=4):
            pydist.init(timeout=scene.timeout_s)
    else:
        pydist.init(timeout=scene.timeout_s)


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


DRILLS = [
    Drill(
        "SIGKILL at start-up, with a time-out of 3 s",
        killed_at_start_up,
        ("Timeout",),
        victim="killed",
        timeout_s=3.0,
        within_s=5.0,
        joins=False,
    ),
    Drill(
        "no descriptors at start-up",
        no_descriptors_at_start_up,
        ("TransportError",),
        backends=("gloo",),
        within_s=10.0,  # joining is in it
        joins=False,
    ),
    Drill("SIGKILL before a collective", killed_before_a_collective, LOST, victim="killed"),
    Drill("SIGKILL in a collective of 4 MiB", killed_in_a_collective, LOST, victim="killed"),
    Drill("SIGKILL after a collective", killed_after_a_collective, LOST, victim="killed"),
    Drill(
        "SIGKILL with live workers of a data loader",
        killed_with_live_workers,
        LOST,
        victim="killed",
        # gloo watches sockets, which the workers hold open until they end.
        backends=("native",),
    ),
    Drill("SIGKILL in backward", killed_in_backward, LOST, victim="killed"),
    Drill("SIGKILL while a checkpoint is written", killed_in_a_checkpoint, LOST, victim="killed"),
    Drill("SIGKILL of rank 0", rank_0_killed, LOST, names="rank 0", victim="killed"),
    Drill("the end of a process without shutdown", left_without_shutdown, LOST, victim="killed"),
    Drill(
        "SIGSTOP, with a time-out of 3 s",
        stopped_in_a_collective,
        ("Timeout",),
        victim="stopped",
        backends=("native",),
        timeout_s=3.0,
        within_s=5.0,
    ),
    Drill(
        "SIGSTOP on gloo, with a time-out of 3 s",
        stopped_in_a_collective,
        # The first to time out closes its connections, which its neighbours may see before theirs.
        ("Timeout", "PeerLost"),
        victim="stopped",
        backends=("gloo",),
        timeout_s=3.0,
        within_s=5.0,
    ),
    Drill(
        "SIGSTOP in a ring, with a time-out of 3 s",
        stopped_in_a_collective,
        ("Timeout",),
        victim="stopped",
        backends=("native",),
        sizes=(4,),
        timeout_s=3.0,
        within_s=5.0,
        env={"PYDIST_ALGORITHM": "ring"},
    ),
    Drill("SIGSTOP, and SIGCONT after 0.5 s", stopped_and_continued, (), within_s=3.0),
    Drill(
        "a rank one step behind, with a time-out of 3 s",
        one_step_behind,
        # The first to time out leaves, which the others read.
        ("Timeout", *LOST),
        timeout_s=3.0,
        within_s=5.0,
    ),
    Drill("another model", another_model, ("Mismatch",)),
    Drill("another dtype", another_dtype, ("Mismatch",)),
    Drill("another count", another_count, ("Mismatch",)),
    Drill("another op", another_op, ("Mismatch",)),
    Drill("another order", another_order, ("Mismatch",)),
    Drill("raising in forward", raised_in_forward, TOLD),
    Drill("raising in backward", raised_in_backward, ("Error", *TOLD)),
    Drill("raising in the data loader", raised_in_a_loader, TOLD),
    Drill("collectives from another thread", collective_from_another_thread, ()),
    Drill("a fork after joining", forked_after_init, ()),
    Drill("joining twice", joined_twice, ()),
    Drill("joining twice, otherwise", joined_twice_otherwise, ("InvalidUsage",), names="77"),
    Drill(
        "no address space left for shared memory",
        no_address_space_left,
        ("TransportError",),
        backends=("native",),
    ),
    Drill("100 starts and ends", started_and_ended_often, (), within_s=60.0),
]
