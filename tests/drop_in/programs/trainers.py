"""Loops as well-known trainers and training scripts write them."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import ROWS, batch, dataset, mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader


class Language(nn.Module):
    """nanoGPT's habits: the head is the embedding, the loss comes with the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 13, bias=False)
        self.embedding.weight = self.head.weight

    def forward(self, words: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Any]:
        hidden = self.embedding(words)
        hidden = hidden + self.block(hidden).cumsum(1)
        logits = self.head(hidden)
        if targets is None:
            return logits[:, [-1]], None
        return logits, functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def configure(self, decay: float, rate: float) -> torch.optim.Optimizer:
        named = {name: p for name, p in self.named_parameters() if p.requires_grad}
        groups = [
            {"params": [p for p in named.values() if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in named.values() if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


@program()
def nano_gpt(lib: Library, record: Record) -> None:
    def words(split: str) -> tuple[Tensor, Tensor]:
        whole = torch.randint(13, (ROWS, 9), generator=generators[split])
        return lib.share(whole[:, :-1]), lib.share(whole[:, 1:])

    generators = {
        "train": torch.Generator().manual_seed(1),
        "val": torch.Generator().manual_seed(2),
    }
    model: Any = Language().to(lib.device)
    optimizer = model.configure(0.1, 0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    model = lib.DataParallel(model)
    raw_model = model.module
    accumulated = 2
    inputs, targets = words("train")
    for iteration in range(4):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * 0.5 * (1 + math.cos(math.pi * iteration / 4))
        held_out = None
        if iteration % 2 == 0:
            raw_model.eval()
            with torch.no_grad():
                held_out = model(*words("val"))[1]
            raw_model.train()
        for micro in range(accumulated):
            model.require_backward_grad_sync = micro == accumulated - 1
            with contextlib.nullcontext():
                _, loss = model(inputs, targets)
                loss = loss / accumulated
            inputs, targets = words("train")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        record(raw_model, optimizer, loss, averaged={"held out": held_out}, norm=norm)


# Lightning's automatic optimisation: forward and backward run inside optimizer.step(closure).
@program()
def lightning_with_closures(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        losses: list[Tensor] = []

        def closure(inputs: Tensor = inputs, targets: Tensor = targets) -> Tensor:
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            losses.append(loss.detach())  # noqa: B023
            return loss

        optimizer.step(closure)
        record(model, optimizer, losses[0])


@program()
def lightning_that_accumulates(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    accumulated = 2
    for number in range(6):
        inputs, targets = batch(lib, number)

        def closure(
            inputs: Tensor = inputs, targets: Tensor = targets, number: int = number
        ) -> Tensor:
            loss = functional.cross_entropy(model(inputs), targets) / accumulated
            if number % accumulated == 0:
                optimizer.zero_grad()
            loss.backward()
            return loss

        if (number + 1) % accumulated:
            with model.no_sync():
                closure()
        else:
            loss = optimizer.step(closure)
            record(model, optimizer, loss)


@program()
def lightning_that_redirects_forward(lib: Library, record: Record) -> None:
    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = self.layers(inputs)
            return out

    model = lib.DataParallel(Trained().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)

        # What Lightning's _ForwardRedirection does: the wrapper calls another method once.
        trained = model.module
        original = trained.forward

        def training_step(
            inputs: Tensor, targets: Tensor = targets, trained: Any = trained
        ) -> Tensor:
            return functional.cross_entropy(trained.layers(inputs), targets)

        trained.forward = training_step
        try:
            loss = model(inputs)
        finally:
            trained.forward = original
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


class Accelerated:
    """The part of an Accelerator that accumulates."""

    def __init__(self, steps: int) -> None:
        self.steps, self.step, self.sync_gradients = steps, 0, True

    @contextlib.contextmanager
    def accumulate(self, model: Any) -> Iterator[None]:
        self.step += 1
        self.sync_gradients = self.step % self.steps == 0
        with contextlib.nullcontext() if self.sync_gradients else model.no_sync():
            yield


@program()
def accelerate_with_accumulation(lib: Library, record: Record) -> None:
    accelerator = Accelerated(2)
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for number in range(6):
        with accelerator.accumulate(model):
            inputs, targets = batch(lib, number)
            loss = functional.cross_entropy(model(inputs), targets)
            (loss / accelerator.steps).backward()
            if accelerator.sync_gradients:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                schedule.step()
                record(model, optimizer, loss)
                optimizer.zero_grad()


@program()
def trainer_with_means_over_tokens(lib: Library, record: Record) -> None:
    # transformers: sums divided by the tokens of all ranks and micro-batches, times the ranks.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        micro_batches = [batch(lib, 2 * step + micro) for micro in range(2)]
        masks = [targets != 0 for _, targets in micro_batches]
        tokens = torch.stack([mask.sum() for mask in masks]).sum()
        dist.all_reduce(tokens)
        for micro, ((inputs, targets), mask) in enumerate(zip(micro_batches, masks, strict=True)):
            is_last = micro == len(micro_batches) - 1
            with contextlib.nullcontext() if is_last else model.no_sync():
                each = functional.cross_entropy(model(inputs), targets, reduction="none")
                loss = (each * mask).sum() / tokens * dist.get_world_size()
                loss.backward()
        optimizer.step()
        model.zero_grad()
        record(model, optimizer, loss, tokens=tokens)


@program()
def the_image_net_example(lib: Library, record: Record) -> None:
    data = dataset(5 * ROWS)
    sampler = lib.DistributedSampler(data, shuffle=False, drop_last=True)
    loader = DataLoader(data, batch_size=ROWS // lib.world_size, sampler=sampler, drop_last=True)
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        right = torch.zeros(2)
        for inputs, targets in loader:
            inputs, targets = inputs.to(lib.device), targets.to(lib.device)
            outputs = model(inputs)
            loss = functional.cross_entropy(outputs, targets)
            right += torch.tensor([float((outputs.argmax(1) == targets).sum()), len(targets)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        dist.all_reduce(right)
        record(model, optimizer, loss, accuracy=right, batches=len(loader))
        schedule.step()


class Smoothed:
    """torchvision's SmoothedValue."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def update(self, value: float, n: int = 1) -> None:
        self.count += n
        self.total += value * n

    def synchronize_between_processes(self) -> None:
        both = torch.tensor([self.count, self.total], dtype=torch.float64)
        dist.barrier()
        dist.all_reduce(both)
        self.count, self.total = int(both[0].item()), both[1].item()


@program(on_gpu=False)
def torchvision_reference(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    model_without_ddp = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=2)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=3)
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], milestones=[2])
    average = torch.optim.swa_utils.AveragedModel(
        model_without_ddp, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    for epoch in range(3):
        model.train()
        meter = Smoothed()
        inputs, targets = batch(lib, epoch)
        outputs = model(inputs)
        loss = functional.cross_entropy(outputs, targets, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update_parameters(model_without_ddp)
        meter.update(loss.item(), n=len(inputs))
        meter.synchronize_between_processes()
        schedule.step()
        model.eval()
        with torch.inference_mode():
            right = (model(inputs).argmax(1) == targets).sum().double()
        dist.all_reduce(right)
        record({"model": model, "average": average}, optimizer, loss, mean=meter.total, right=right)
