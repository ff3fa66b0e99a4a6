"""Training loops with something of their own: losses, closures, schedules, joins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import CLASSES, FEATURES, ROWS, batch, mlp
from torch import Tensor, nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn import functional


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, 8)
        self.kinds, self.boxes = nn.Linear(8, CLASSES), nn.Linear(8, 4)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.trunk(inputs).relu()
        kinds, boxes = self.kinds(hidden), self.boxes(hidden)
        if not self.training or targets is None:
            return {"kinds": kinds.argmax(1), "boxes": boxes}
        return {
            "loss_kinds": functional.cross_entropy(kinds, targets),
            "loss_boxes": functional.smooth_l1_loss(boxes, inputs[:, :4]),
        }


@program()
def a_detector_with_a_dictionary_of_losses(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Detector().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        losses = model(inputs, targets)
        loss = sum(losses.values())
        with torch.no_grad():  # for the log of rank 0
            names = sorted(losses)
            reduced = torch.stack([losses[name] for name in names])
            dist.reduce(reduced, dst=0)
            logged = (reduced / dist.get_world_size()) if dist.get_rank() == 0 else None
            everybody = [logged.tolist() if logged is not None else None]
            dist.broadcast_object_list(everybody, src=0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss, logged=everybody[0])


class Contrast(nn.Module):
    """MoCo: keys of all ranks go into a queue, which is a buffer; the key encoder follows."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(FEATURES, 4), nn.Linear(FEATURES, 4)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", functional.normalize(torch.randn(4, 2 * ROWS), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        gathered = [torch.ones_like(keys) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, keys)
        rows = torch.stack(gathered, 1).flatten(0, 1)
        start = int(self.place)
        self.queue[:, start : start + len(rows)] = rows.t()
        self.place[0] = (start + len(rows)) % self.queue.shape[1]

    def forward(self, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
        query = functional.normalize(self.query(first), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.key.parameters(), self.query.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            key = functional.normalize(self.key(second), dim=1)
        positive = (query * key).sum(1, keepdim=True)
        logits = torch.cat([positive, query @ self.queue.clone().detach()], dim=1) / 0.2
        self.enqueue(key)
        return logits, torch.zeros(len(logits), dtype=torch.long, device=first.device)


@program()
def momentum_contrast(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Contrast().to(lib.device))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(4):
        inputs, _ = batch(lib, step)
        logits, labels = model(inputs, inputs.flip(1))
        loss = functional.cross_entropy(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def second_order_by_closures(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.LBFGS(
        model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
    )
    inputs, targets = batch(lib, 0)

    def mean_of_ranks(loss: Tensor) -> Tensor:
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean / dist.get_world_size()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        return mean_of_ranks(loss)  # the line search decides on it, on all ranks alike

    for _ in range(3):
        loss = optimizer.step(closure)
        record(model, optimizer, loss)


@program()
def a_plateau_of_a_reduced_metric(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    best, waited = float("inf"), 0
    for epoch in range(6):
        inputs, targets = batch(lib, epoch)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        metric = loss.detach().clone()
        dist.all_reduce(metric)
        value = metric.item() / dist.get_world_size()
        schedule.step(value)
        record(model, optimizer, loss, metric=value)
        waited = 0 if value < best else waited + 1
        best = min(best, value)
        stop = torch.tensor([int(waited >= 3)], device=lib.device)
        dist.broadcast(stop, src=0)
        if stop.item():
            break


def with_each(
    schedule_of: Callable[[torch.optim.Optimizer], Any],
) -> Callable[[Library, Record], None]:
    def run(lib: Library, record: Record) -> None:
        model = lib.DataParallel(mlp().to(lib.device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        schedule = schedule_of(optimizer)
        for step in range(4):
            inputs, targets = batch(lib, step)
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            record(model, optimizer, loss)

    return run


@program()
def one_cycle(lib: Library, record: Record) -> None:
    with_each(lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=6))(
        lib, record
    )


@program()
def warm_restarts(lib: Library, record: Record) -> None:
    with_each(lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2))(lib, record)


@program()
def an_evaluation_by_rank_0_alone(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if lib.rank == 0:
            model.eval()
            with torch.no_grad():
                model(inputs)
            model.train()
        record(model, optimizer, loss)


@program()
def another_optimizer_amid_training(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(4):
        if step == 2:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def an_optimizer_made_before_wrapping(lib: Library, record: Record) -> None:
    module = mlp().to(lib.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    model = lib.DataParallel(module)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program("torch DDP")
def models_averaged_from_time_to_time(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    for step in range(4):
        inputs, targets = batch(lib, step)
        optimizer.zero_grad()
        with model.no_sync():
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        averager.average_parameters(model.parameters())
        record(model, optimizer, loss)
