"""What programs do with gradients between backward and step."""

import io

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import batch, mlp
from torch import Tensor, nn
from torch.nn import functional


@program()
def gradient_surgery(lib: Library, record: Record) -> None:
    # PCGrad: of two tasks' gradients, each loses what points against the other.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        of_tasks = []
        for task in range(2):
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = functional.cross_entropy(outputs, targets) if task else outputs.square().mean()
            loss.backward()
            of_tasks.append([parameter.grad for parameter in model.parameters()])
        first, second = (torch.cat([g.flatten() for g in gradients]) for gradients in of_tasks)
        dot = torch.dot(first, second)
        if dot < 0:
            second = second - dot / first.square().sum() * first
        merged = first + second
        for parameter in model.parameters():
            parameter.grad = merged[: parameter.numel()].view_as(parameter).clone()
            merged = merged[parameter.numel() :]
        optimizer.step()
        record(model, optimizer, loss, tasks=of_tasks)


@program()
def gradients_held_through_views_and_detach(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = []
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        weight = next(model.parameters()).grad
        held.append([weight.detach(), weight.view(-1)[:3], weight.t(), weight.data])
        optimizer.step()
    record(model, optimizer, loss, held=held)


@program("torch DDP")
def gradients_held_as_views_of_buckets(lib: Library, record: Record) -> None:
    # What gradient_as_bucket_view=True promises: nothing to who holds a gradient across zero_grad.
    model = lib.DataParallel(mlp().to(lib.device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad(set_to_none=False)
        before = [parameter.grad for parameter in model.parameters()]
        loss.backward()
        kept = [g is p.grad for g, p in zip(before, model.parameters(), strict=True)]
        optimizer.step()
        record(model, optimizer, loss, kept=kept if step else None)


@program()
def the_same_tensor_while_accumulating(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        inputs, targets = batch(lib, 2 * step)
        functional.cross_entropy(model(inputs), targets).backward()
        before = [parameter.grad for parameter in model.parameters()]
        inputs, targets = batch(lib, 2 * step + 1)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        same = [g is p.grad for g, p in zip(before, model.parameters(), strict=True)]
        optimizer.step()
        record(model, optimizer, loss, same=same, held=before)


@program()
def clipping_by_norm(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        record(model, optimizer, loss, norm=norm)


@program()
def clipping_by_value_and_logging_of_norms(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    log: dict[str, list[float]] = {name: [] for name, _ in model.module.named_parameters()}
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.module.named_parameters():
            log[name].append(parameter.grad.norm().item())
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)
        optimizer.step()
        record(model, optimizer, loss)
    record(log=log)


@program()
def noise_in_gradients(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(5)  # every rank adds the same
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(lib.device)
            parameter.grad.add_(noise, alpha=0.01 / (1 + step))
        optimizer.step()
        record(model, optimizer, loss)


@program()
def rates_for_each_layer_as_lars_has_them(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                weight_norm, gradient_norm = parameter.norm(), parameter.grad.norm()
                parameter.grad.add_(parameter, alpha=1e-3)
                if weight_norm > 0 and gradient_norm > 0:
                    parameter.grad.mul_(0.1 * weight_norm / (gradient_norm + 1e-9))
        optimizer.step()
        record(model, optimizer, loss)


@program()
def gradients_flattened_into_one_buffer(lib: Library, record: Record) -> None:
    # Apex's and fairseq's way: one buffer, of which every gradient is a view.
    model = lib.DataParallel(mlp().to(lib.device))
    flat = torch.zeros(sum(p.numel() for p in model.parameters()), device=lib.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        flat.zero_()
        offset = 0
        for parameter in model.parameters():
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        # Where gradients are now is the library's choice.
        flat = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        norm = flat.norm()
        flat.mul_(0.1 / torch.clamp(norm, min=0.1))
        offset = 0
        for parameter in model.parameters():
            view = flat[offset : offset + parameter.numel()].view_as(parameter)
            parameter.grad.copy_(view)
            offset += parameter.numel()
        optimizer.step()
        record(model, optimizer, loss, norm=norm)


@program()
def gradients_replaced_by_hand(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            if parameter.dim() > 1:  # gradient centralisation
                centred = parameter.grad - parameter.grad.mean(1, keepdim=True)
                parameter.grad = centred
        optimizer.step()
        record(model, optimizer, loss)
        for parameter in model.parameters():
            parameter.grad = None


@program()
def gradients_summed_into_a_moving_average(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averages: dict[Tensor, Tensor] = {}
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():  # Grokfast's: what changes slowly is amplified
            if parameter not in averages:
                averages[parameter] = parameter.grad.data.detach()
            else:
                averages[parameter] = averages[parameter] * 0.5 + parameter.grad.data.detach() * 0.5
            parameter.grad.data = parameter.grad.data + averages[parameter] * 2.0
        optimizer.step()
        record(model, optimizer, loss, averages=list(averages.values()))


@program()
def sharpness_aware_minimisation(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        inputs, targets = batch(lib, step)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        norm = torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(parameter.grad * (0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), before, strict=True):
                parameter.copy_(value)
        optimizer.step()
        record(model, optimizer, loss, norm=norm)


@program()
def parameters_as_one_vector(lib: Library, record: Record) -> None:
    # An evolution strategy's, or a line search's, way of writing parameters.
    model = lib.DataParallel(mlp().to(lib.device))
    for step in range(3):
        inputs, targets = batch(lib, step)
        model.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        vector = torch.nn.utils.parameters_to_vector(model.parameters())
        gradient = torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        torch.nn.utils.vector_to_parameters(vector - 0.1 * gradient, model.parameters())
        record(model, None, loss)


@program()
def updates_written_by_hand(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        for parameter in model.parameters():
            parameter.data -= 0.1 * parameter.grad.data
        record(model, None, loss)
        for parameter in model.parameters():
            parameter.grad.data.zero_()


@program()
def gradients_of_autograd_averaged_by_hand(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        parameters = list(model.parameters())
        for parameter, gradient in zip(
            parameters, torch.autograd.grad(loss, parameters), strict=True
        ):
            dist.all_reduce(gradient)
            parameter.grad = gradient / dist.get_world_size()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def backward_to_some_inputs_only(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        inputs.requires_grad_()
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        slope = inputs.grad * dist.get_world_size()  # of a mean over the rows of all ranks
        share = [torch.empty_like(slope) for _ in range(dist.get_world_size())]
        dist.all_gather(share, slope.contiguous())
        whole = torch.stack(share, 1).flatten(0, 1) / dist.get_world_size() ** 2
        optimizer.step()
        record(model, optimizer, loss, slope=whole)


@program()
def gradients_moved_to_a_copy_of_the_parameters(lib: Library, record: Record) -> None:
    # Master weights by hand: the model's gradients are given to another list of parameters.
    model = lib.DataParallel(mlp().to(lib.device))
    masters = [nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad = parameter.grad
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        record(model, optimizer, loss)


@program()
def parameters_given_other_memory(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        model.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.data = parameter.data - 0.1 * parameter.grad
        record(model, None, loss)


@program(on_gpu=False)
def gradients_saved_to_files(lib: Library, record: Record) -> None:
    # A file holds the gradient, and not what lies around it in memory.
    model = lib.DataParallel(nn.Sequential(mlp(), nn.Linear(3, 3000)))
    inputs, _ = batch(lib, 0)
    model(inputs).square().mean().backward()
    sizes = []
    for parameter in model.module[0].parameters():
        file = io.BytesIO()
        torch.save(parameter.grad, file)
        sizes.append(len(file.getvalue()) < 10_000)
    record(model, small=sizes)
