"""Gradient checkpointing: activations that backward computes again."""

import torch
from harness import Library, Record, program
from nets import CLASSES, FEATURES, batch, mlp
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Blocks(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inwards = nn.Linear(FEATURES, FEATURES)
        self.blocks = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(3))
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inwards(inputs)
        for block in self.blocks:
            hidden = hidden + checkpoint(block, hidden, use_reentrant=self.reentrant).tanh()
        out: Tensor = self.out(hidden)
        return out


def train(lib: Library, record: Record, module: nn.Module, **options: object) -> None:
    model = lib.DataParallel(module.to(lib.device), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def checkpoints_without_reentry(lib: Library, record: Record) -> None:
    train(lib, record, Blocks(reentrant=False))


@program()
def checkpoints_with_reentry(lib: Library, record: Record) -> None:
    train(lib, record, Blocks(reentrant=True))


@program()
def checkpoints_with_reentry_in_a_static_graph(lib: Library, record: Record) -> None:
    train(lib, record, Blocks(reentrant=True), static_graph=True)


class SharedBlock(Blocks):
    """One weight in several checkpoints."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.inwards(inputs)
        for _ in range(3):
            hidden = hidden + checkpoint(self.blocks[0], hidden, use_reentrant=False).tanh()
        out: Tensor = self.out(hidden)
        return out


@program()
def a_block_shared_by_checkpoints(lib: Library, record: Record) -> None:
    train(lib, record, SharedBlock(reentrant=False), find_unused_parameters=True)


@program()
def a_sequence_in_segments(lib: Library, record: Record) -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = mlp()

        def forward(self, inputs: Tensor) -> Tensor:
            out: Tensor = checkpoint_sequential(self.layers, 2, inputs, use_reentrant=False)
            return out

    train(lib, record, Segments())


@program()
def checkpoints_and_accumulation(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Blocks(reentrant=False).to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        with model.no_sync():
            inputs, targets = batch(lib, 2 * step)
            functional.cross_entropy(model(inputs), targets).backward()
        inputs, targets = batch(lib, 2 * step + 1)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)
