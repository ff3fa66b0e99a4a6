"""Two models that are trained in two threads of one process."""

import threading
from typing import Any

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import batch, mlp
from torch.nn import functional


def train_in_threads(lib: Library, record: Record, models: dict[str, Any]) -> None:
    optimizers = {name: torch.optim.SGD(m.parameters(), lr=0.1) for name, m in models.items()}
    losses: dict[str, Any] = {}
    failures: list[BaseException] = []

    def train(name: str, first: int) -> None:
        try:
            for step in range(3):
                inputs, targets = batch(lib, first + step)
                losses[name] = functional.cross_entropy(models[name](inputs), targets)
                optimizers[name].zero_grad()
                losses[name].backward()
                optimizers[name].step()
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=train, args=(name, 10 * number))
        for number, name in enumerate(models)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    record(models, optimizers, averaged=losses)


# On a GPU both backwards run on one thread of autograd, where neither may wait for other ranks.
@program(on_gpu=False)
def two_models_in_two_threads(lib: Library, record: Record) -> None:
    models = {}
    for name in ("first", "second"):
        group = dist.new_group(list(range(dist.get_world_size())))
        models[name] = lib.DataParallel(mlp().to(lib.device), process_group=group)
    train_in_threads(lib, record, models)
