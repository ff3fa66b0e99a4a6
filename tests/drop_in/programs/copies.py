"""Copies, pickles, states and checkpoints."""

import copy
import io
import pickle

import torch
import torch.distributed as dist
from harness import Library, Record, program
from nets import batch, mlp
from torch import Tensor, nn
from torch.nn import functional


def step_of(
    lib: Library, model: nn.Module, optimizer: torch.optim.Optimizer, number: int
) -> Tensor:
    inputs, targets = batch(lib, number)
    loss = functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@program()
def states_into_an_unwrapped_model(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = step_of(lib, model, optimizer, 0)
    inside, outside = mlp().to(lib.device), mlp().to(lib.device)
    inside.load_state_dict(model.module.state_dict())
    state = {name.replace("module.", ""): value for name, value in model.state_dict().items()}
    outside.load_state_dict(state)
    inputs, _ = batch(lib, 1)
    same = torch.equal(inside(inputs), outside(inputs))
    record({"model": model, "inside": inside, "outside": outside}, optimizer, loss, same=same)


@program()
def states_with_and_without_the_prefix(lib: Library, record: Record) -> None:
    torch.manual_seed(8)
    saved = mlp().state_dict()
    model = lib.DataParallel(mlp().to(lib.device))
    model.load_state_dict({f"module.{name}": value for name, value in saved.items()})
    model.module.load_state_dict(saved)
    model.load_state_dict(model.state_dict())
    record(model)


@program(on_gpu=False)
def a_checkpoint_of_rank_0_for_all(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(2):
        loss = step_of(lib, model, optimizer, step)
        schedule.step()
    files: list[bytes | None] = [None]
    if dist.get_rank() == 0:
        buffer = io.BytesIO()
        states = {"model": model.module, "optimizer": optimizer, "schedule": schedule}
        torch.save({name: each.state_dict() for name, each in states.items()}, buffer)
        files = [buffer.getvalue()]
    dist.broadcast_object_list(files, src=0)
    torch.manual_seed(100 + dist.get_rank())
    again = lib.DataParallel(mlp().to(lib.device))
    other = torch.optim.AdamW(again.parameters(), lr=1.0)
    later = torch.optim.lr_scheduler.StepLR(other, 1, gamma=0.5)
    states = torch.load(io.BytesIO(files[0] or b""), map_location=lib.device)
    again.module.load_state_dict(states["model"])
    other.load_state_dict(states["optimizer"])
    later.load_state_dict(states["schedule"])
    for step in range(2, 4):
        loss = step_of(lib, again, other, step)
        later.step()
        record(again, other, loss)


@program()
def a_deep_copy_of_the_module(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = copy.deepcopy(model.module).requires_grad_(False)
    for step in range(3):
        loss = step_of(lib, model, optimizer, step)
        with torch.no_grad():
            for name, value in model.module.state_dict().items():
                average.state_dict()[name].lerp_(value, 0.1)
        record({"model": model, "average": average}, optimizer, loss)


@program()
def a_deep_copy_of_the_wrapper(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = step_of(lib, model, optimizer, 0)
    best = copy.deepcopy(model)
    loss = step_of(lib, model, optimizer, 1)
    with torch.no_grad():
        outputs = best(batch(lib, 2)[0])
    record(model, optimizer, loss, averaged={"outputs": outputs.mean()})
    best_state = {k.replace("module.", ""): v for k, v in best.state_dict().items()}
    record(best=best_state)


@program(on_gpu=False)
def the_best_state_kept_and_restored(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept = copy.deepcopy(model.state_dict())
    for step in range(2):
        loss = step_of(lib, model, optimizer, step)
    model.load_state_dict(kept)
    loss = step_of(lib, model, optimizer, 2)
    record(model, optimizer, loss)


@program()
def states_that_follow_the_parameters(lib: Library, record: Record) -> None:
    # A state is no copy: it shows the parameters as they are.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = model.module.state_dict()
    loss = step_of(lib, model, optimizer, 0)
    record(model, optimizer, loss, state=state)


@program(on_gpu=False)
def a_pickled_module(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = step_of(lib, model, optimizer, 0)
    again = pickle.loads(pickle.dumps(model.module))
    buffer = io.BytesIO()
    torch.save(model.module, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    record({"model": model, "again": again, "loaded": loaded}, optimizer, loss)


@program(on_gpu=False)
def a_pickled_wrapper(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = step_of(lib, model, optimizer, 0)
    again = pickle.loads(pickle.dumps(model))
    record({"model": model, "again": again}, optimizer, loss)


@program(on_gpu=False)
def training_resumed_in_place(lib: Library, record: Record) -> None:
    # A loop that goes back to its last good state after a loss that is not finite.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    good = None
    for step in range(4):
        loss = step_of(lib, model, optimizer, step)
        if step == 1:
            good = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        if step == 2 and good is not None:
            model.load_state_dict(good[0])
            optimizer.load_state_dict(good[1])
        record(model, optimizer, loss)
