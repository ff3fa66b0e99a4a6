"""Samplers and loaders."""

from typing import Any

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import ROWS, dataset, mlp
from torch.nn import functional
from torch.utils.data import DataLoader


def train_an_epoch(lib: Library, record: Record, loader: DataLoader[Any]) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for inputs, targets in loader:
        loss = functional.cross_entropy(model(inputs.to(lib.device)), targets.to(lib.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def a_sampler_in_order(lib: Library, record: Record) -> None:
    data = dataset(3 * ROWS)
    sampler = lib.DistributedSampler(data, shuffle=False)
    train_an_epoch(lib, record, DataLoader(data, ROWS // lib.world_size, sampler=sampler))


@program()
def a_smaller_last_batch_dropped(lib: Library, record: Record) -> None:
    data = dataset(2 * ROWS + 7)
    sampler = lib.DistributedSampler(
        data, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=False
    )
    loader = DataLoader(data, ROWS // lib.world_size, sampler=sampler, drop_last=True)
    train_an_epoch(lib, record, loader)
    record(batches=len(loader))


@program("torch DDP")
def samples_that_do_not_divide(lib: Library, record: Record) -> None:
    # Some ranks get a sample twice, as torch pads; or some samples are left out.
    for drop_last in (False, True):
        data = range(ROWS + 1)
        sampler = lib.DistributedSampler(data, shuffle=False, drop_last=drop_last)
        facts = [len(sampler), sampler.num_samples, sampler.total_size, sampler.num_replicas]
        record(local={"indices": list(sampler), "rank": sampler.rank}, facts=facts)


@program("torch DDP")
def fewer_samples_than_ranks(lib: Library, record: Record) -> None:
    sampler = lib.DistributedSampler([7], shuffle=False)
    record(local={"indices": list(sampler)})


@program()
def shuffled_epochs_share_all_samples(lib: Library, record: Record) -> None:
    # The order is each library's own; what holds of it is the same.
    sampler = lib.DistributedSampler(range(24), shuffle=True, seed=3)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        own = torch.tensor(list(sampler), dtype=torch.float64)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        orders.append(torch.stack(parts, 1).flatten().tolist())
    sampler.set_epoch(0)
    again = [int(index) for index in sampler] == [
        int(index) for index in orders[0][lib.rank :: lib.world_size]
    ]
    record(samples=[sorted(order) for order in orders], again=again, anew=orders[0] != orders[1])


@program()
def an_epoch_that_is_set_after_the_iterator(lib: Library, record: Record) -> None:
    # As Lightning's loops: iter, set_epoch, next. The first batch decides.
    data = dataset(2 * ROWS)
    sampler = lib.DistributedSampler(data, shuffle=True, seed=3)
    loader = DataLoader(data, ROWS // lib.world_size, sampler=sampler)
    orders: dict[int, list[Any]] = {}
    for epoch in (0, 1, 0):
        batches = iter(loader)
        sampler.set_epoch(epoch)
        inputs = torch.cat([inputs for inputs, _ in batches])
        whole = [torch.empty_like(inputs) for _ in range(dist.get_world_size())]
        dist.all_gather(whole, inputs)
        orders.setdefault(epoch, []).append(torch.cat(whole))
    first, again = orders[0]
    other = orders[1][0]
    record(rows=len(other), again=torch.equal(first, again), anew=not torch.equal(first, other))
    everything = [torch.sort(rows.flatten()).values for rows in (first, other)]
    record(samples=everything)


@program()
def a_loader_with_workers(lib: Library, record: Record) -> None:
    data = dataset(2 * ROWS)
    sampler = lib.DistributedSampler(data, shuffle=False)
    batch_size = ROWS // lib.world_size
    train_an_epoch(lib, record, DataLoader(data, batch_size, sampler=sampler, num_workers=1))


@program()
def a_batch_looked_at_before_training(lib: Library, record: Record) -> None:
    data = dataset(2 * ROWS)
    sampler = lib.DistributedSampler(data, shuffle=False)
    loader = DataLoader(data, ROWS // lib.world_size, sampler=sampler)
    first, _ = next(iter(loader))
    record(averaged={"first": first.mean()})
    train_an_epoch(lib, record, loader)
    train_an_epoch(lib, record, loader)
