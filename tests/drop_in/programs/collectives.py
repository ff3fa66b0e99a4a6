"""Collectives that programs call themselves, on the group that they share with the wrapper."""

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import CLASSES, batch, mlp
from torch.nn import functional


@program()
def metrics_reduced_by_hand(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        outputs = model(inputs)
        loss = functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        right = (outputs.argmax(1) == targets).sum()
        counts = torch.stack([right, torch.tensor(len(targets), device=lib.device)])
        dist.all_reduce(counts, op=dist.ReduceOp.SUM)
        worst = functional.cross_entropy(outputs.detach(), targets, reduction="none").max()
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        confusion = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device=lib.device)
        ones = torch.ones_like(targets)
        confusion.index_put_((targets, outputs.argmax(1)), ones, accumulate=True)
        dist.all_reduce(confusion)
        optimizer.step()
        record(model, optimizer, loss, counts=counts, worst=worst, confusion=confusion)


@program()
def outputs_gathered_from_all_ranks(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    model.eval()
    inputs, _ = batch(lib, 0)
    with torch.no_grad():
        outputs = model(inputs)
    gathered = [torch.empty_like(outputs) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, outputs)
    whole = torch.stack(gathered, 1).flatten(0, 1)
    objects = [None] * dist.get_world_size()
    dist.all_gather_object(objects, {"rows": len(inputs)})
    rows = sum(each["rows"] for each in objects)
    record(model, outputs=whole, rows=rows)


@program()
def objects_from_rank_0(lib: Library, record: Record) -> None:
    settings = [{"rate": 0.05, "name": "run"} if lib.rank == 0 else None]
    dist.broadcast_object_list(settings, src=0)
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=settings[0]["rate"])
    inputs, targets = batch(lib, 0)
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    dist.barrier()
    record(model, optimizer, loss, name=settings[0]["name"])


@program()
def collectives_in_the_midst_of_steps(lib: Library, record: Record) -> None:
    # Between forward and backward, and started before a backward that they outlive.
    model = lib.DataParallel(mlp().to(lib.device), bucket_cap_mb=0.0001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        mean = loss.detach().clone()
        work = dist.all_reduce(mean, async_op=True)
        optimizer.zero_grad()
        loss.backward()
        work.wait()
        optimizer.step()
        record(model, optimizer, loss, mean=mean / dist.get_world_size())


@program()
def a_process_group_of_ones_own(lib: Library, record: Record) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    model = lib.DataParallel(mlp().to(lib.device), process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        record(model, optimizer, loss, mean=total / dist.get_world_size())


@program("torch DDP")
def a_process_group_of_some_ranks(lib: Library, record: Record) -> None:
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model = lib.DataParallel(mlp().to(lib.device), process_group=groups[lib.rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program(on_gpu=False)
def the_loss_of_one_batch_over_all_ranks(lib: Library, record: Record) -> None:
    # CLIP's: similarities of this rank's rows with those of all ranks.
    from torch.distributed import nn as differentiable

    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, _ = batch(lib, step)
        told = functional.normalize(model(inputs), dim=1)
        everyone = torch.stack(differentiable.all_gather(told), 1).flatten(0, 1)
        logits = everyone @ everyone.t() * 3
        loss = functional.cross_entropy(logits, torch.arange(len(logits)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def lightning_logs_synchronised_means(lib: Library, record: Record) -> None:
    # Lightning's _sync_ddp; a sample count is an integer.
    def mean_of_ranks(value: torch.Tensor) -> torch.Tensor:
        dist.barrier()
        if dist.get_backend() != "gloo":
            dist.all_reduce(value, op=dist.ReduceOp.AVG)
            return value
        dist.all_reduce(value, op=dist.ReduceOp.SUM)
        return value.copy_(value / dist.get_world_size())

    model = lib.DataParallel(mlp().to(lib.device))
    inputs, targets = batch(lib, 0)
    loss = functional.cross_entropy(model(inputs), targets).detach()
    mean = mean_of_ranks(loss.clone())
    count = mean_of_ranks(torch.tensor(7 + lib.rank, device=lib.device))
    record(model, None, loss, mean=mean, local={"count": count})
