"""torch.func, higher derivatives, and what computes gradients in other ways than backward."""

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import batch, mlp
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional


@program()
def gradients_of_each_sample(lib: Library, record: Record) -> None:
    # DP-SGD: each sample's gradient is clipped, then they are summed over all ranks.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(values: dict[str, Tensor], row: Tensor, target: Tensor) -> Tensor:
        out = functional_call(model.module, values, (row[None],))
        return functional.cross_entropy(out, target[None])

    for step in range(3):
        inputs, targets = batch(lib, step)
        values = {name: p.detach() for name, p in model.module.named_parameters()}
        of_samples = vmap(grad(loss_of), in_dims=(None, 0, 0))(values, inputs, targets)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in of_samples.values()]).norm(dim=0)
        factors = (0.5 / (norms + 1e-6)).clamp(max=1.0)
        rows = len(inputs) * dist.get_world_size()
        for name, parameter in model.module.named_parameters():
            clipped = torch.einsum("i,i...->...", factors, of_samples[name])
            dist.all_reduce(clipped)
            parameter.grad = clipped / rows
        optimizer.step()
        record(model, optimizer)


@program()
def the_wrapper_called_functionally(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    inputs, _ = batch(lib, 0)
    halved = {name: parameter * 0.5 for name, parameter in model.named_parameters()}
    with torch.no_grad():
        outputs = functional_call(model, halved, (inputs,))
    record(model, averaged={"outputs": outputs.mean()})


@program("torch DDP")
def an_inner_step_that_is_differentiated(lib: Library, record: Record) -> None:
    # MAML: the outer loss is that of parameters after an inner step.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        named = dict(model.module.named_parameters())
        inner = functional.cross_entropy(model(inputs), targets)
        slopes = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        moved = {
            name: value - 0.1 * slope
            for (name, value), slope in zip(named.items(), slopes, strict=True)
        }
        loss = functional.cross_entropy(functional_call(model.module, moved, (inputs,)), targets)
        gradients = torch.autograd.grad(loss, list(named.values()))
        for parameter, gradient in zip(named.values(), gradients, strict=True):
            dist.all_reduce(gradient)
            parameter.grad = gradient / dist.get_world_size()
        optimizer.step()
        record(model, optimizer, loss, local={"inner": inner})


@program()
def a_product_with_the_hessian(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = batch(lib, 0)
    parameters = list(model.parameters())
    for _ in range(2):
        loss = functional.cross_entropy(model(inputs), targets)
        slopes = torch.autograd.grad(loss, parameters, create_graph=True)
        along = [slope.detach() for slope in slopes]
        for each in along:
            dist.all_reduce(each)
            each.div_(dist.get_world_size())
        dot = sum((slope * each).sum() for slope, each in zip(slopes, along, strict=True))
        products = torch.autograd.grad(dot, parameters)
        for parameter, product in zip(parameters, products, strict=True):
            dist.all_reduce(product)
            parameter.grad = product / dist.get_world_size()
        optimizer.step()
        record(model, optimizer, loss)


@program(without_ddp="torch's DDP fails in it", refused="create_graph")
def backward_that_creates_a_graph(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    inputs, targets = batch(lib, 0)
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward(create_graph=True)
    record(local={"loss": loss})


@program(on_gpu=False)
def forward_mode_differentiation(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    inputs, _ = batch(lib, 0)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs, torch.ones_like(inputs))
        slope = torch.autograd.forward_ad.unpack_dual(model.module(dual)).tangent
    record(model, averaged={"slope": slope.mean()})


@program()
def jacobians_between_steps(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        jacobian = torch.autograd.functional.jacobian(lambda x: model(x).sum(0), inputs)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss, averaged={"jacobian": jacobian.square().mean()})
