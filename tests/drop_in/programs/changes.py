"""Models that change while they train."""

import torch
from harness import Library, Record, program
from nets import CLASSES, FEATURES, batch, mlp
from torch import Tensor, nn
from torch.nn import functional


@program()
def freezing_amid_training(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device), find_unused_parameters=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            for parameter in model.module[0].parameters():
                parameter.requires_grad_(False)
                parameter.grad = None
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program(without_ddp="torch's DDP leaves out for good what was frozen when it was wrapped")
def unfreezing_amid_training(lib: Library, record: Record) -> None:
    module = mlp().to(lib.device)
    module[0].requires_grad_(False)
    model = lib.DataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        if step == 2:
            model.module[0].requires_grad_(True)
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def unfreezing_and_wrapping_anew(lib: Library, record: Record) -> None:
    module = mlp().to(lib.device)
    module[0].requires_grad_(False)
    model = lib.DataParallel(module)
    optimizer = torch.optim.SGD(filter(lambda p: p.requires_grad, model.parameters()), lr=0.1)
    for step in range(4):
        if step == 2:
            module = model.module
            module[0].requires_grad_(True)
            model = lib.DataParallel(module)
            optimizer.add_param_group({"params": list(module[0].parameters())})
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


class Growing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, FEATURES)])
        self.out = nn.Linear(FEATURES, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs).tanh()
        out: Tensor = self.out(inputs)
        return out


@program(without_ddp="torch's DDP does not see what is added after it has wrapped")
def a_layer_added_amid_training(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Growing().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            torch.manual_seed(step)
            layer = nn.Linear(FEATURES, FEATURES).to(lib.device)
            model.module.layers.append(layer)
            optimizer.add_param_group({"params": list(layer.parameters())})
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


@program()
def a_head_replaced_and_wrapped_anew(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    for phase in range(2):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(2):
            inputs, targets = batch(lib, 2 * phase + step)
            loss = functional.cross_entropy(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            record(model, optimizer, loss)
        module = model.module
        torch.manual_seed(3)
        module[2] = nn.Linear(8, CLASSES).to(lib.device)
        model = lib.DataParallel(module)


@program()
def freezing_by_name(lib: Library, record: Record) -> None:
    # Names under the wrapper begin with "module." for torch's DDP.
    model = lib.DataParallel(mlp().to(lib.device), find_unused_parameters=True)
    frozen = []
    for name, parameter in model.named_parameters():
        if name.startswith("module.0."):
            parameter.requires_grad_(False)
            frozen.append(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss, frozen=len(frozen))


@program()
def decay_by_name(lib: Library, record: Record) -> None:
    model = lib.DataParallel(mlp().to(lib.device))
    plain = [p for name, p in model.named_parameters() if name.endswith("bias")]
    decayed = [p for name, p in model.named_parameters() if not name.endswith("bias")]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = 1.0
        self.layers = mlp()

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers(inputs) * self.scale
        return out


@program()
def an_attribute_of_the_module(lib: Library, record: Record) -> None:
    model = lib.DataParallel(Scaled().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        model.module.scale = 1.0 + step
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss, scale=model.module.scale)


@program()
def an_attribute_of_the_wrapper(lib: Library, record: Record) -> None:
    # On torch's DDP it is the wrapper's own, which no forward of the module reads.
    model = lib.DataParallel(Scaled().to(lib.device))
    model.scale = 5.0
    model.epoch = 3
    inputs, targets = batch(lib, 0)
    loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    record(model, None, loss, scale=model.scale, of_module=model.module.scale, epoch=model.epoch)


@program()
def modes_and_freezing_through_the_wrapper(lib: Library, record: Record) -> None:
    module = nn.Sequential(nn.Linear(FEATURES, 8), nn.Dropout(0.5), nn.Linear(8, CLASSES))
    model = lib.DataParallel(module.to(lib.device))
    modes = [(model.training, model.module.training)]
    for mode in (False, True, False):
        model.train(mode)
        modes.append((model.training, model.module[1].training))
    model.module.train()
    modes.append((model.training, model.module[1].training))
    model.module.eval()
    modes.append((model.training, model.module[1].training))
    model.train()
    model.requires_grad_(False)
    frozen = [parameter.requires_grad for parameter in model.module.parameters()]
    model.requires_grad_(True)
    model.apply(lambda part: isinstance(part, nn.Linear) and nn.init.ones_(part.bias))
    kinds = [type(part).__name__ for part in model.modules()][-4:]
    record(model, modes=modes, frozen=frozen, kinds=kinds)


@program("torch DDP")
def backward_of_the_module_inside(lib: Library, record: Record) -> None:
    # Torch's DDP knows nothing of a forward that did not go through it.
    model = lib.DataParallel(mlp().to(lib.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        inputs, targets = batch(lib, step)
        loss = functional.cross_entropy(model.module(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        record(model, optimizer, loss)
