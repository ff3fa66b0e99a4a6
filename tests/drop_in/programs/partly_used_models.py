"""Models of which a step uses a part, on all ranks or on some."""

from __future__ import annotations

import torch
from harness import Library, Record, program
from nets import CLASSES, FEATURES, batch
from plain_loop import train
from torch import Tensor, nn
from torch.nn import functional


class Experts(nn.Module):
    """Each row goes to the expert that the gate prefers, so that some have nothing to do."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.gate = nn.Linear(FEATURES, count)
        self.experts = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(count))

    def forward(self, inputs: Tensor) -> Tensor:
        weights = self.gate(inputs).softmax(-1)
        out = inputs.new_zeros(len(inputs), CLASSES)
        for number, expert in enumerate(self.experts):
            chosen = weights.argmax(-1) == number
            if chosen.any():
                rows = expert(inputs[chosen]) * weights[chosen, number : number + 1]
                out = out.index_put((chosen.nonzero()[:, 0],), rows)
        return out


@program()
def experts_with_nothing_to_do(lib: Library, record: Record) -> None:
    train(lib, record, Experts(7), find_unused_parameters=True, optimizer_class=torch.optim.SGD)


@program("torch DDP")
def experts_of_each_rank(lib: Library, record: Record) -> None:
    # Experts live where they are: DDP is told to leave them alone.
    torch.manual_seed(10)
    shared = nn.Linear(FEATURES, FEATURES)
    torch.manual_seed(20 + lib.rank)
    module = nn.Sequential(shared, nn.Tanh(), nn.Linear(FEATURES, CLASSES))
    ignored = [name for name, _ in module.named_parameters() if name.startswith("2.")]
    torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
        module, ignored
    )
    train(lib, record, module)


class WithHeads(nn.Module):
    """Some heads are used in some steps, one is never."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, FEATURES)
        self.heads = nn.ModuleList(nn.Linear(FEATURES, CLASSES) for _ in range(3))

    def forward(self, inputs: Tensor, head: int) -> Tensor:
        out: Tensor = self.heads[head](self.trunk(inputs).tanh())
        return out


@program()
def heads_used_in_some_steps(lib: Library, record: Record) -> None:
    model = lib.DataParallel(WithHeads().to(lib.device), find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs, head=step % 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program("torch DDP")
def heads_used_by_some_ranks(lib: Library, record: Record) -> None:
    model = lib.DataParallel(WithHeads().to(lib.device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs, (lib.rank + step) % 2), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)
