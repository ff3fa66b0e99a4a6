"""A rank of one of the builds that bench/beside_build.py compares.

It is run by the Python of that build, which may be older than this file, so it uses no more of
pydist than what every build has.

Usage: timed_rank.py MODELS WORK ADDRESS. MODELS is the path of pydist/benchmarks/steps/models.py:
both builds train the models of the newer. It connects to ADDRESS and answers each number of calls
that it is told with the seconds that they took it together.
"""

import gc
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import torch

import pydist


def step_of(models: str, kind: str, name: str) -> Callable[[], object]:
    spec = importlib.util.spec_from_file_location("models", models)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    bare, inputs = module.MODELS[name].make()
    model = pydist.DataParallel(bare)
    optimizer: Any = None
    if kind == "sharded":
        optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=1e-5, fused=True)

    def step() -> None:
        model.zero_grad()
        model(*inputs).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.finish()

    return step


def messages_of(kind: str, size: int) -> Callable[[], object]:
    sent = torch.ones(size // 4)
    received = torch.empty_like(sent)
    partner = pydist.rank() ^ 1

    def exchange() -> None:
        work = pydist.send(sent, partner, async_op=True)
        pydist.recv(received, partner)
        work.wait()

    def ping_pong() -> None:
        if pydist.rank() < partner:
            pydist.send(sent, partner)
            pydist.recv(received, partner)
        else:
            pydist.recv(received, partner)
            pydist.send(sent, partner)

    return exchange if kind == "exchange" else ping_pong


def work_of(models: str, work: str) -> Callable[[], object]:
    kind, _, argument = work.partition(":")
    if kind == "all_reduce":
        tensor = torch.zeros(int(argument) // 4)
        return lambda: pydist.all_reduce(tensor)
    if kind in ("exchange", "ping_pong"):
        return messages_of(kind, int(argument))
    return step_of(models, kind, argument)


def main() -> None:
    models, work, address = sys.argv[1:]
    pydist.init()
    call = work_of(models, work)
    # A collection looks at everything that torch has made: tens of milliseconds.
    gc.disable()
    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[pydist.local_rank() % len(cpus)]})
    with Client(address) as connection:
        connection.send((pydist.rank(), pydist.world_size(), None))
        while isinstance(calls := connection.recv(), int):
            pydist.barrier()
            start_s = time.perf_counter()
            for _ in range(calls):
                call()
            connection.send(time.perf_counter() - start_s)


if __name__ == "__main__":
    main()
