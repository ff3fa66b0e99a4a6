"""What programs do with the wrapper itself: unwrap it, copy it, look into it, hand it on."""

import contextlib
import copy
import pickle
from typing import Any

import torch
import torch.nn.utils.prune
from harness import Library, Record, program
from nets import CLASSES, FEATURES, batch, mlp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel


def step_of(lib: Library, model: Any, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    inputs, targets = batch(lib, number)
    loss = functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


@program()
def unwrapping_where_there_is_a_module(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = step_of(lib, model, optimizer, 0)
    by_attribute = model.module if hasattr(model, "module") else model
    by_type = model.module if isinstance(model, DistributedDataParallel) else model
    by_getattr = getattr(model, "module", model)
    states = [each.state_dict() for each in (by_attribute, by_getattr)]
    names = [sorted(state) for state in states]
    outputs = by_type(batch(lib, 1)[0]).mean()
    record(model, optimizer, loss, states=states, names=names, averaged={"outputs": outputs})


@program()
def unwrapping_by_children(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    core = next(iter(model.children()))
    names = [name for name, _ in model.named_children()]
    record(model, kind=type(core).__name__, names=names)


@program()
def the_module_of_a_deep_copy(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    best = copy.deepcopy(model)
    loss = step_of(lib, model, optimizer, 0)
    record(model, optimizer, loss, best=best.module.state_dict())


@program()
def training_a_deep_copy(lib: Library, record: Record) -> None:
    # Reptile: a copy goes a few steps ahead, and the model follows it.
    model = lib.DataParallel(mlp().to(lib.device))
    for outer in range(2):
        fast = copy.deepcopy(model)
        optimizer = torch.optim.SGD(fast.parameters(), lr=0.1)
        for inner in range(2):
            loss = step_of(lib, fast, optimizer, 2 * outer + inner)
        with torch.no_grad():
            for slow, ahead in zip(model.parameters(), fast.parameters(), strict=True):
                slow.add_(ahead - slow, alpha=0.5)
        record({"model": model, "fast": fast}, optimizer, loss)


@program(on_gpu=False)
def training_what_was_pickled(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    again = pickle.loads(pickle.dumps(model))
    optimizer = torch.optim.SGD(again.parameters(), lr=0.1)
    for step in range(2):
        loss = step_of(lib, again, optimizer, step)
        record(again, optimizer, loss)


@program("torch DDP", on_gpu=False)
def states_of_distributed_checkpoint(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    loss = step_of(lib, model, optimizer, 0)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    record(model, optimizer, loss, names=sorted(of_model), groups=of_optimizer["param_groups"])
    kept = copy.deepcopy((of_model, of_optimizer))
    step_of(lib, model, optimizer, 1)
    set_state_dict(model, optimizer, model_state_dict=kept[0], optim_state_dict=kept[1])
    loss = step_of(lib, model, optimizer, 2)
    record(model, optimizer, loss)


class Halves(nn.Module):
    """A model whose parts are wrapped, and which is not wrapped itself."""

    def __init__(self, lib: Library) -> None:
        super().__init__()
        self.backbone = lib.DataParallel(nn.Linear(FEATURES, 5).to(lib.device))
        self.head = lib.DataParallel(nn.Linear(5, CLASSES).to(lib.device))

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.head(self.backbone(inputs).tanh())
        return out


@program()
def parts_wrapped_apart_in_one_model(lib: Library, record: Record) -> None:
    model = Halves(lib)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        loss = step_of(lib, model, optimizer, step)
        record(model, optimizer, loss)
    modes = []
    for mode in (False, True):
        model.train(mode)
        modes.append([part.training for part in (model.backbone, model.backbone.module)])
    record(modes=modes)


@program()
def forward_called_by_name(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = step_of(lib, model.forward, optimizer, step)
        record(model, optimizer, loss)


@program(
    without_ddp="nobody wraps twice on purpose, but libraries wrap what they are given",
    refused="DistributedDataParallel",
)
def wrapped_again_by_torch(lib: Library, record: Record) -> None:
    model = DistributedDataParallel(lib.DataParallel(mlp().to(lib.device)))
    inputs, targets = batch(lib, 0)
    functional.cross_entropy(model(inputs), targets).backward()
    record(model)


@program(
    without_ddp="nobody wraps twice on purpose, but libraries wrap what they are given",
    refused="DistributedDataParallel",
)
def wrapping_what_torch_has_wrapped(lib: Library, record: Record) -> None:
    model = lib.DataParallel(DistributedDataParallel(mlp().to(lib.device)))
    inputs, targets = batch(lib, 0)
    functional.cross_entropy(model(inputs), targets).backward()
    record(model)


@program()
def a_loop_that_skips_batches(lib: Library, record: Record) -> None:
    # All ranks leave a batch out: before backward, or where forward raises.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        inputs, targets = batch(lib, step)
        optimizer.zero_grad()
        try:
            loss = functional.cross_entropy(model(inputs if step != 1 else inputs[:, :2]), targets)
        except RuntimeError:
            continue
        if step == 2:
            continue
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def backward_in_two_parts(lib: Library, record: Record) -> None:
    # The head's backward first, the rest from the gradient of what lies between.
    model = lib.DataParallel(mlp().to(lib.device))
    head = lib.DataParallel(nn.Linear(CLASSES, CLASSES).to(lib.device))
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    for step in range(2):
        inputs, targets = batch(lib, step)
        hidden = model(inputs)
        cut = hidden.detach().requires_grad_()
        loss = functional.cross_entropy(head(cut), targets)
        optimizer.zero_grad()
        loss.backward()
        hidden.backward(cut.grad)
        optimizer.step()
        record({"model": model, "head": head}, optimizer, loss)


class Itself(nn.Module):
    """A module that goes backward in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        loss = functional.cross_entropy(self.layers(inputs), targets)
        loss.backward()
        return loss.detach()


@program(without_ddp="torch's DDP fails in its second forward")
def backward_within_forward(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Itself().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*batch(lib, step))
        optimizer.step()
        record(model, optimizer, loss)


@program()
def anomaly_detection(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.autograd.set_detect_anomaly(True):
        for step in range(2):
            record(model, optimizer, step_of(lib, model, optimizer, step))


@program()
def pruned_weights(lib: Library, record: Record) -> None:
    module = mlp().to(lib.device)
    torch.nn.utils.prune.l1_unstructured(module[0], "weight", amount=0.5)
    model = lib.DataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        record(model, optimizer, step_of(lib, model, optimizer, step))


@program()
def weights_pruned_after_wrapping(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if step:
            torch.nn.utils.prune.l1_unstructured(model.module[0], "weight", amount=0.3)
        record(model, optimizer, step_of(lib, model, optimizer, step))


class Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5


@program(without_ddp="torch's DDP fails where a parameter is replaced")
def a_parametrization_after_wrapping(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    torch.nn.utils.parametrize.register_parametrization(model.module[0], "weight", Halved())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        record(model, optimizer, step_of(lib, model, optimizer, step))


@program()
def weights_clamped_after_each_step(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    for step in range(3):
        loss = step_of(lib, model, optimizer, step)
        for parameter in model.parameters():
            parameter.data.clamp_(-0.2, 0.2)
        record(model, optimizer, loss)


@program()
def a_class_of_ones_own_on_the_wrapper(lib: Library, record: Record) -> None:
    class Transparent(lib.DataParallel):
        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.module, name)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs) * 2

    module = mlp().to(lib.device)
    module.words = 7
    model = Transparent(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        loss = step_of(lib, model, optimizer, step)
        record(model, optimizer, loss, words=model.words)


@program()
def a_model_without_anything_to_train(lib: Library, record: Record) -> None:
    torch.manual_seed(4)
    frozen = mlp().to(lib.device).requires_grad_(False)
    model: Any = frozen
    with contextlib.suppress(RuntimeError):  # torch's DDP refuses it
        model = lib.DataParallel(frozen)
    if lib.name != "one process":
        assert model is frozen
    record(averaged={"outputs": model(batch(lib, 0)[0]).mean()}, training=model.training)


@program(refused="two can't average")
def two_wrappers_of_one_encoder(lib: Library, record: Record) -> None:
    encoder = nn.Linear(FEATURES, 4).to(lib.device)
    actor = lib.DataParallel(nn.Sequential(encoder, nn.Linear(4, 2).to(lib.device)))
    critic = lib.DataParallel(nn.Sequential(encoder, nn.Linear(4, 1).to(lib.device)))
    parameters = {*actor.parameters(), *critic.parameters()}
    optimizer = torch.optim.SGD(list(parameters), lr=0.1)
    for step in range(2):
        inputs, _ = batch(lib, step)
        loss = actor(inputs).square().mean() + critic(inputs).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record({"actor": actor, "critic": critic}, None, loss)
