"""Hooks on parameters, modules, outputs, gradients and states."""

from typing import Any

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import CLASSES, FEATURES, batch, mlp, words
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional


def train(lib: Library, record: Record, model: Any, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def hooks_on_parameters_before_wrapping(lib: Library, record: Record) -> None:
    module = mlp().to(lib.device)
    module[0].weight.register_hook(lambda gradient: gradient * 0.5)
    module[2].bias.register_hook(lambda gradient: gradient.clone().zero_())
    train(lib, record, lib.DataParallel(module))


@program()
def hooks_on_parameters_after_wrapping(lib: Library, record: Record) -> None:
    # A mask that keeps pruned weights at zero.
    model = lib.DataParallel(mlp().to(lib.device))
    mask = (torch.arange(6, device=lib.device) % 2).expand(8, 6).to(torch.float64)
    with torch.no_grad():
        model.module[0].weight.mul_(mask)
    model.module[0].weight.register_hook(lambda gradient: gradient * mask)
    train(lib, record, model)


@program("torch DDP")
def hooks_see_gradients_before_they_are_averaged(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    seen: list[Tensor] = []
    model.module[2].bias.register_hook(lambda gradient: seen.append(gradient.clone()))
    train(lib, record, model)
    record(local={"seen": seen})


@program("torch DDP")
def hooks_after_accumulation(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    norms: list[Tensor] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    train(lib, record, model)
    record(local={"norms": sorted(norm.item() for norm in norms)})


@program(without_ddp="torch's DDP lets each rank step on its own gradients", refused="backward")
def optimizer_steps_within_backward(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    for number in range(2):
        inputs, targets = batch(lib, number)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        record(model, None, loss)


@program()
def hooks_on_modules(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    means: list[Tensor] = []
    slopes: list[Tensor] = []
    model.module[0].register_forward_hook(lambda m, args, out: means.append(out.detach().mean()))
    model.module[2].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    model.module[2].register_full_backward_hook(
        lambda m, of_inputs, of_outputs: slopes.append(of_outputs[0].square().mean().sqrt())
    )
    train(lib, record, model)
    record(averaged={"means": means})


@program()
def hooks_on_the_wrapper(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    calls: list[str] = []
    model.register_forward_pre_hook(lambda m, args: calls.append("before"))
    model.register_forward_hook(lambda m, args, out: out * 2)
    model.register_full_backward_hook(lambda m, of_inputs, of_outputs: calls.append("backward"))
    train(lib, record, model)
    record(calls=calls)


@program("torch DDP")
def hooks_on_outputs(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        outputs = model(inputs)
        outputs.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        outputs.retain_grad()
        loss = functional.cross_entropy(outputs, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss, local={"slope": outputs.grad})


@program()
def hooks_on_states(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    calls: list[str] = []
    model.register_state_dict_post_hook(lambda *arguments: calls.append("saved"))
    model.register_state_dict_pre_hook(lambda *arguments: calls.append("saving"))
    model.register_load_state_dict_pre_hook(lambda *arguments: calls.append("loading"))
    model.register_load_state_dict_post_hook(lambda *arguments: calls.append("loaded"))
    model.load_state_dict(model.state_dict())
    record(model, calls=calls)


@program()
def hooks_of_all_modules(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    kinds: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, args, out: kinds.append(type(module).__name__)
    )
    try:
        train(lib, record, model, steps=1)
    finally:
        handle.remove()
    record(kinds=[kind for kind in kinds if kind in ("Linear", "Tanh", "Sequential")])


@program("torch DDP")
def a_communication_hook(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))

    def hook(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        scaled = bucket.buffer().mul_(state / dist.get_world_size())
        future = dist.all_reduce(scaled, async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    model.register_comm_hook(0.5, hook)
    train(lib, record, model)


# The sums are taken in 16 bits, in an order of each backend's own.
@program("torch DDP", tolerance=1e-3)
def compression_to_sixteen_bits(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device, torch.float32))
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs.float()), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program("torch DDP", on_gpu=False)
def power_sgd(lib: Library, record: Record) -> None:
    model = lib.DataParallel(nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3)))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(lib, record, model, steps=5)


@program("torch DDP", on_gpu=False)
def a_hook_that_counts_what_a_bucket_holds(lib: Library, record: Record) -> None:
    """The signs of gradients, and the mean of their sizes."""
    model = lib.DataParallel(mlp().to(lib.device))

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        exact = bucket.buffer()
        sent = exact.abs().mean() * exact.sign()
        done = dist.all_reduce(sent, async_op=True).get_future()
        return done.then(lambda future: future.value()[0] / lib.world_size)

    model.register_comm_hook(None, hook)
    train(lib, record, model)


def averaged(tensor: Tensor) -> torch.futures.Future[Tensor]:
    done = dist.all_reduce(tensor.div_(dist.get_world_size()), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


@program("torch DDP", on_gpu=False)
def a_hook_that_treats_a_bucket_as_one_thing(lib: Library, record: Record) -> None:
    """By its norm, and by where a gradient lies in it; 4.6 MB of gradients."""

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        whole = bucket.buffer()
        places = torch.arange(whole.numel(), device=whole.device).remainder(7)
        return averaged(whole * (1 + places) / (whole.norm() + 1e-3) * (2 + bucket.index()))

    ways: list[dict[str, Any]] = [
        {},
        {"bucket_cap_mb": 1},
        {"bucket_cap_mb_list": [1, 2]},
        {"find_unused_parameters": True},
        {"bucket_cap_mb": 1, "static_graph": True},
        {"bucket_cap_mb": 1, "static_graph": True, "find_unused_parameters": True},
    ]
    for options in ways:
        torch.manual_seed(5)
        layers = [layer for _ in range(9) for layer in (nn.Linear(256, 256), nn.Tanh())]
        net = nn.Sequential(nn.Linear(FEATURES, 256), *layers, nn.Linear(256, CLASSES))
        model = lib.DataParallel(net.to(lib.device), **options)
        model.register_comm_hook(None, hook)
        train(lib, record, model)


@program("torch DDP", on_gpu=False)
def a_hook_and_a_static_graph_with_a_layer_that_nothing_uses(lib: Library, record: Record) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(FEATURES, 5)
            self.unused = nn.Linear(5, 5)
            self.last = nn.Linear(5, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(self.first(inputs).tanh())

    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        whole = bucket.buffer()
        seen.append(torch.tensor([bucket.index(), bucket.is_last(), whole.numel()]))
        return averaged(whole * (2 + bucket.index()))

    for find_unused_parameters in (False, True):
        seen: list[Tensor] = []
        model = lib.DataParallel(
            Net().to(lib.device),
            bucket_cap_mb=0.0001,
            static_graph=True,
            find_unused_parameters=find_unused_parameters,
        )
        model.register_comm_hook(None, hook)
        train(lib, record, model, steps=4)
        record(local={"seen": seen})


@program("torch DDP", on_gpu=False)
def a_hook_and_complex_numbers_beside_an_odd_count_of_reals(lib: Library, record: Record) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.spectrum = nn.Parameter(torch.randn(3, dtype=torch.complex128))
            self.weights = nn.Parameter(torch.randn(5))
            self.phase = nn.Parameter(torch.randn(1, dtype=torch.complex128))

        def forward(self, inputs: Tensor) -> Tensor:
            waves = (self.spectrum * self.phase * inputs[:, :3]).abs().square().sum()
            return waves + (self.weights * inputs[:, :5]).square().sum()

    model = lib.DataParallel(Net().to(lib.device))
    model.register_comm_hook(None, lambda _, bucket: averaged(bucket.buffer()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(lib, step)[0])
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program("torch DDP")
def hooks_on_several_gradients(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    seen: list[Tensor] = []

    def note(gradients: Any) -> None:
        seen.append(torch.cat([gradient.flatten() for gradient in gradients]))

    handle = torch.autograd.graph.register_multi_grad_hook(list(model.parameters()), note)
    train(lib, record, model)
    handle.remove()
    record(local={"seen": seen})


@program(without_ddp="torch's DDP steps with its averages", refused="backward")
def optimizers_that_torch_puts_into_backward(lib: Library, record: Record) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    module = mlp().to(lib.device)
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    model = lib.DataParallel(module)
    for number in range(2):
        inputs, targets = batch(lib, number)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        record(model, None, loss)


@program("torch DDP", on_gpu=False)
def sparse_embeddings_and_a_communication_hook(lib: Library, record: Record) -> None:
    def halved(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        return default_hooks.allreduce_hook(group, bucket).then(lambda mean: mean.value() * 0.5)

    train_with_hook(lib, record, halved)


@program("torch DDP", on_gpu=False)
def sparse_embeddings_and_gradients_left_local_by_a_hook(lib: Library, record: Record) -> None:
    def local(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    train_with_hook(lib, record, local)


def train_with_hook(lib: Library, record: Record, hook: Any) -> None:
    table = nn.Embedding(20, 4, sparse=True)
    module = nn.Sequential(table, nn.Flatten(), nn.Linear(5 * 4, CLASSES))
    model = lib.DataParallel(module.to(lib.device))
    model.register_comm_hook(None, hook)
    for step in range(3):
        inputs, targets = words(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        gradients = [parameter.grad.to_dense().clone() for parameter in model.parameters()]
        record(local={"gradients": gradients})
