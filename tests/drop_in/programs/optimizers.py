"""Optimizers of torch's, in all of their ways to go through gradients."""

from typing import Any

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import batch, mlp
from torch.nn import functional


def train(lib: Library, record: Record, model: Any, optimizer: Any, first: int = 0) -> None:
    for step in range(first, first + 2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def many_optimizers_in_turn(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    for number, name in enumerate(
        ["Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]
    ):
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=False)
        train(lib, record, model, optimizer, 2 * number)


@program()
def optimizers_that_take_all_gradients_at_once(lib: Library, record: Record) -> None:
    # Nesterov's momentum is added to the gradients themselves then.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True, weight_decay=0.1
    )
    train(lib, record, model, optimizer)
    train(lib, record, model, torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True), 2)


@program(on_gpu=False)
def fused_optimizers(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    train(lib, record, model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
    train(lib, record, model, torch.optim.SGD(model.parameters(), lr=0.1, fused=True), 2)


@program()
def an_optimizer_for_whole_matrices(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    rest = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizers = {
        "matrices": torch.optim.Muon(matrices, lr=0.01),
        "rest": torch.optim.AdamW(rest, lr=0.01),
    }
    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        for optimizer in optimizers.values():
            optimizer.step()
        # Newton and Schulz's iteration is in bfloat16: what a rounding does to it is not small.
        record(model, None, loss)


class Lookahead(torch.optim.Optimizer):
    """An optimizer of one's own, around another."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.count = inner, 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.inner.step(closure)
        self.count += 1
        if self.count % 2 == 0:
            fast = [p for group in self.param_groups for p in group["params"]]
            for slow, parameter in zip(self.slow, fast, strict=True):
                slow.add_(parameter - slow, alpha=0.5)
                parameter.copy_(slow)
        return loss


@program()
def an_optimizer_around_another(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = Lookahead(torch.optim.Adam(model.parameters(), lr=0.01))
    train(lib, record, model, optimizer)
    train(lib, record, model, optimizer, 2)


@program(refused="never averaged")
def gradients_averaged_by_hand_after_no_sync(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(lib, 0)
    with model.no_sync():
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    record(model, optimizer, loss)


@program()
def gradients_averaged_by_hand_in_no_sync(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs, targets = batch(lib, step)
        optimizer.zero_grad()
        with model.no_sync():
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
            optimizer.step()
        record(model, optimizer, loss)
