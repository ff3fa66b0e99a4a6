"""Mixed precision, loss scaling, and parameters of 16 bits."""

import torch
from harness import Library, Record, program
from nets import batch, mlp
from torch.nn import functional

# Of bfloat16: 8 bits of precision, a few roundings in another order.
IN_BFLOAT16 = 2**-6


# Forward rounds to bfloat16 alike on any number of ranks, sums over rows in backward do not.
@program(on_gpu=False, tolerance=IN_BFLOAT16)
def autocast(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().float())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(inputs.float()), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program(on_gpu=False)
def loss_scaling(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(5):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        record(model, optimizer, loss, norm=norm, scale=scaler.get_scale())


@program("torch DDP", on_gpu=False)
def a_step_that_overflows_on_one_rank(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(4):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        if step == 1 and lib.rank == lib.world_size - 1:
            loss = loss * float("inf")
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        record(model, optimizer, None, scale=scaler.get_scale())


@program(on_gpu=False)
def loss_scaling_with_accumulation(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(3):
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            inputs, targets = batch(lib, 2 * step + micro)
            loss = functional.cross_entropy(model(inputs), targets) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        record(model, optimizer, loss)
        optimizer.zero_grad(set_to_none=True)


# torch's DDP adds bfloat16 up rank by rank, pydist in float32, with one rounding at the end.
@program("torch DDP", tolerance=IN_BFLOAT16)
def parameters_in_bfloat16(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device, torch.bfloat16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs.bfloat16()).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


# Of float32: 24 bits.
@program(tolerance=1e-5)
def parameters_in_float32_with_one_in_float64(lib: Library, record: Record) -> None:
    module = mlp().float()
    module[2].double()
    module.insert(2, torch.nn.Identity())
    module[2].register_forward_hook(lambda part, args, out: out.double())
    model = lib.DataParallel(module.to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs.float()), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)
