"""Gradients of several backwards in one step."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import batch, mlp
from torch import Tensor, nn
from torch.nn import functional

MICRO_BATCHES = 3


@program()
def one_backward_a_step(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(4):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def no_sync_but_for_the_last(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            for micro in range(MICRO_BATCHES - 1):
                inputs, targets = batch(lib, MICRO_BATCHES * step + micro)
                (functional.cross_entropy(model(inputs), targets) / MICRO_BATCHES).backward()
        inputs, targets = batch(lib, MICRO_BATCHES * step + MICRO_BATCHES - 1)
        loss = functional.cross_entropy(model(inputs), targets) / MICRO_BATCHES
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def the_attribute_instead_of_no_sync(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        for micro in range(MICRO_BATCHES):
            model.require_backward_grad_sync = micro == MICRO_BATCHES - 1
            inputs, targets = batch(lib, MICRO_BATCHES * step + micro)
            loss = functional.cross_entropy(model(inputs), targets) / MICRO_BATCHES
            loss.backward()
        optimizer.step()
        record(model, optimizer, loss)
        optimizer.zero_grad(set_to_none=True)


@program()
def accumulation_with_every_backward_averaged(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for micro in range(MICRO_BATCHES):
            inputs, targets = batch(lib, MICRO_BATCHES * step + micro)
            loss = functional.cross_entropy(model(inputs), targets) / MICRO_BATCHES
            loss.backward()
        optimizer.step()
        record(model, optimizer, loss)
        optimizer.zero_grad()


@program()
def gradients_zeroed_in_place(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        with model.no_sync():
            inputs, targets = batch(lib, 2 * step)
            functional.cross_entropy(model(inputs), targets).backward()
        inputs, targets = batch(lib, 2 * step + 1)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def a_shorter_last_window(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    batches = [batch(lib, number) for number in range(5)]
    for number, (inputs, targets) in enumerate(batches):
        is_last = number == len(batches) - 1
        steps_now = (number + 1) % MICRO_BATCHES == 0 or is_last
        if steps_now:
            loss = functional.cross_entropy(model(inputs), targets) / MICRO_BATCHES
            loss.backward()
            optimizer.step()
            record(model, optimizer, loss)
            optimizer.zero_grad()
        else:
            with model.no_sync():
                (functional.cross_entropy(model(inputs), targets) / MICRO_BATCHES).backward()


@program("torch DDP")
def forward_in_no_sync_and_backward_outside(lib: Library, record: Record) -> None:
    # It is the forward that tells torch's DDP whether its backward is averaged.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(lib, 2 * step)
        with model.no_sync():
            loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        own = [parameter.grad.clone() for parameter in model.parameters()]
        inputs, targets = batch(lib, 2 * step + 1)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss, local={"own gradients": own})


@program("torch DDP")
def forward_outside_and_backward_in_no_sync(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        with model.no_sync():
            loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


class Hidden(nn.Module):
    """Returns what is not searched for tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(scores=self.net(inputs))


@program("torch DDP")
def backward_after_another_forward_in_no_sync(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Hidden().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        inputs, targets = batch(lib, step)
        first = model(inputs)
        with model.no_sync():
            model(inputs)
        loss = functional.cross_entropy(first.scores, targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program("torch DDP")
def local_steps_between_averages_of_the_model(lib: Library, record: Record) -> None:
    # Local SGD: ranks train apart, and meet every few steps.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        inputs, targets = batch(lib, step)
        optimizer.zero_grad()
        with model.no_sync():
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
        if step % 2:
            with torch.no_grad():
                for parameter in model.parameters():
                    dist.all_reduce(parameter)
                    parameter.div_(dist.get_world_size())
        record(model, optimizer, loss)


@program()
def accumulated_gradients_changed_on_the_way(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            inputs, targets = batch(lib, 2 * step)
            functional.cross_entropy(model(inputs), targets).backward()
        for number, parameter in enumerate(model.parameters()):
            if number == 0:
                parameter.grad.mul_(0.5)  # in place
            elif number == 1:
                parameter.grad = parameter.grad * 0.5  # another tensor
            elif number == 2:
                parameter.grad = None  # dropped
        inputs, targets = batch(lib, 2 * step + 1)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def gradients_put_by_hand_before_backward(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        optimizer.zero_grad()
        outputs = model(inputs)
        parameters = list(model.parameters())
        own = torch.autograd.grad(outputs.square().mean(), parameters, retain_graph=True)
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient
        loss = functional.cross_entropy(outputs, targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


class TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(mlp() for _ in range(2))

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        out: torch.Tensor = self.heads[head](inputs)
        return out


@program()
def accumulated_by_a_head_that_the_last_backward_leaves_out(lib: Library, record: Record) -> None:
    model = lib.DataParallel(TwoHeads().to(lib.device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            inputs, targets = batch(lib, 2 * step)
            functional.cross_entropy(model(inputs, 0), targets).backward()
        inputs, targets = batch(lib, 2 * step + 1)
        loss = functional.cross_entropy(model(inputs, 1), targets)
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)
