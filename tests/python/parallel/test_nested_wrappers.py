"""Two wrappers that would average one gradient are refused, on all ranks.

The file is long because wrappers of torch's are of several kinds, and each may come first or last.
"""

import copy
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from launch import Ranks
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from training import (
    LIMIT_S,
    TIME_LIMIT,
    Runner,
    assert_near,
    batch,
    joined,
    train_like_reference,
)

import pydist

pytestmark = TIME_LIMIT


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double()


def wrap_a_wrapped_one(kind: str) -> str:
    joined()
    inner: nn.Module = build()
    if kind == "torch's":
        wrapped: nn.Module = DistributedDataParallel(inner)
    elif kind == "torch's within":
        wrapped = nn.ModuleDict({"a": nn.Linear(1, 1), "b": DistributedDataParallel(inner)})
    elif kind == "torch's within a compiled one":
        wrapped = torch.compile(nn.Sequential(DistributedDataParallel(inner)), backend="eager")  # type: ignore[assignment]
    elif kind == "a copy of torch's":
        wrapped = AveragedModel(DistributedDataParallel(inner))
    elif kind == "replicated":
        wrapped = nn.Sequential(replicate(inner))
    elif kind == "ours within":
        wrapped = nn.ModuleDict({"b": pydist.DataParallel(inner)})
    else:
        wrapped = pydist.DataParallel(inner)
    with pytest.raises(pydist.InvalidUsage) as caught:
        pydist.DataParallel(wrapped)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("torch's", "the module is a torch DistributedDataParallel already"),
        ("torch's within", "b of the module is a torch DistributedDataParallel already"),
        ("torch's within a compiled one", "_orig_mod.0 of the module is a torch Distributed"),
        ("a copy of torch's", "module of the module is a torch DistributedDataParallel already"),
        ("replicated", "0 of the module is averaged by torch's replicate() already"),
        ("ours", "the module is a pydist.DataParallel already"),
        ("ours within", "b of the module is a pydist.DataParallel already"),
    ],
)
def test_wrapped_models_are_not_wrapped_again(three: Ranks, kind: str, says: str) -> None:
    for message in three.run(wrap_a_wrapped_one, kind, timeout=LIMIT_S):
        assert says in message


def put_torch_around(kind: str, how: str) -> str:
    rank, _ = joined()
    model = pydist.DataParallel(build())
    inner: nn.Module = model
    if how == "deeper":
        inner = nn.Sequential(nn.Linear(4, 4).double(), nn.ModuleDict({"a": model}))
    wrap: Any = DistributedDataParallel if kind == "distributed" else nn.DataParallel
    if how == "later":
        outer = wrap(nn.Sequential(nn.Linear(4, 4).double(), nn.Identity()))
        outer.module[1] = model
        with pytest.raises(pydist.InvalidUsage) as caught:
            outer(batch(rank, 5, 4))
    else:
        # What Accelerate's prepare() does to a model that is wrapped already.
        with pytest.raises(pydist.InvalidUsage) as caught:
            wrap(inner)
    # The model itself works on.
    model(batch(rank, 5, 4)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("how", ["directly", "deeper", "later"])
def test_torch_around_a_wrapped_model_is_refused(three: Ranks, how: str) -> None:
    for message in three.run(put_torch_around, "distributed", how, timeout=LIMIT_S):
        assert "Accelerate's prepare() and Trainers" in message
        assert "give them the plain module (model.module)" in message


@pytest.mark.parametrize("how", ["directly", "deeper"])
def test_copies_in_threads_of_a_wrapped_model_are_refused(three: Ranks, how: str) -> None:
    for message in three.run(put_torch_around, "threads", how, timeout=LIMIT_S):
        assert (
            "torch.nn.DataParallel, or torch.nn.parallel.replicate(), was given a pydist" in message
        )
        assert "start a process for each GPU" in message


def copy_for_threads(how: str) -> str:
    rank, _ = joined()
    model = pydist.DataParallel(build())
    copied = model if how == "itself" else nn.Sequential(nn.Identity(), model)
    with pytest.raises(pydist.InvalidUsage) as caught:
        torch.nn.parallel.replicate(copied, [0])
    assert list(model.children()) == [model.module]
    model(batch(rank, 5, 4)).sum().backward()
    return str(caught.value)


@pytest.mark.parametrize("how", ["itself", "within"])
def test_replicating_a_wrapped_model_is_refused(three: Ranks, how: str) -> None:
    for message in three.run(copy_for_threads, how, timeout=LIMIT_S):
        assert "torch.nn.parallel.replicate(), was given a pydist.DataParallel" in message
        assert "start a process for each GPU" in message


class Averaged(nn.Module):
    """Computes with what it is given, beside a part of its own."""

    def __init__(self, teacher: nn.Module) -> None:
        super().__init__()
        self.student = build()
        self.teacher = teacher

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.student(x) - self.teacher(x)
        return out


def keep_an_average(wrap: Any) -> list[Tensor]:
    """An average of the weights, in torch's wrapper, as programs do, and beside ours."""
    rank, _ = joined()
    model = wrap(build())
    average = copy.deepcopy(model)
    if isinstance(model, DistributedDataParallel):
        model.ema = average
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        loss = model(batch(rank, 5, 4, step=step)).sin().mean()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            pairs = zip(average.module.parameters(), model.module.parameters(), strict=True)
            for mean, now in pairs:
                mean.lerp_(now, 0.25)
            seen += [loss.detach(), average.eval()(batch(rank, 5, 4))]
    return seen


def keep_averages() -> None:
    averages = map(keep_an_average, (pydist.DataParallel, DistributedDataParallel))
    for ours, theirs in zip(*averages, strict=True):
        assert_near(ours, theirs)


def test_an_average_of_the_weights(run: Runner) -> None:
    run(keep_averages)


class CallsItsChildren(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, dtype=torch.float64)
        self.scale = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = child(x)
        return x * self.scale


def additions_to(model: Any) -> Iterator[Callable[[], Any]]:
    """All that would make something of the name `more` a part of the module."""
    weighted = nn.CrossEntropyLoss(weight=torch.ones(2))
    linear, parameter = nn.Linear(4, 4), nn.Parameter(torch.ones(1))
    modules = copy.deepcopy(model), AveragedModel(model), linear, nn.Dropout(), weighted
    for value in (*modules, parameter):
        yield partial(setattr, model, "more", value)
    yield partial(model.add_module, "more", linear)
    yield partial(model.register_module, "more", linear)
    yield partial(model.register_parameter, "more", parameter)
    yield partial(model.register_buffer, "more", torch.ones(1))


def set_modules_in_the_wrapper() -> None:
    """torch's would have them beside the module; ours stands for the module."""
    rank, _ = joined()
    says = r"keep it in a variable.*model\.module\.more"
    for model in (pydist.DataParallel(CallsItsChildren()), pydist.DataParallel(build())):
        before = model(batch(rank, 5, 4))
        names = list(model.state_dict())
        for add in additions_to(model):
            with pytest.raises(pydist.InvalidUsage, match=says):
                add()
        model.more = [copy.deepcopy(model)]
        model.loss = nn.MSELoss()
        assert list(model.state_dict()) == names
        outputs = model(batch(rank, 5, 4))
        assert torch.equal(outputs, before)
        model.loss(outputs, torch.zeros_like(outputs)).backward()
        del model.loss
        assert not hasattr(model, "loss")


def put_something_in_place_of_a_part() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(CallsItsChildren())
    model.add_module("first", model.module.first)  # as torch's conversions do
    model.module = model.module
    for other in (copy.deepcopy(model.module), torch.compile(model.module, backend="eager")):
        with pytest.raises(pydist.InvalidUsage, match="wraps one for life: make another wrapper"):
            model.module = other
    model(batch(rank, 5, 4)).sum().backward()


def test_what_is_put_in_place_of_a_part(run: Runner) -> None:
    run(put_something_in_place_of_a_part)


def test_modules_that_are_set_in_the_wrapper(run: Runner) -> None:
    run(set_modules_in_the_wrapper)


def hold_a_frozen_one(how: str) -> None:
    rank, size = joined()
    teacher = pydist.DataParallel(build())
    if how == "trained before":
        teacher(batch(rank, 5, 4)).sum().backward()
        teacher.zero_grad()
    elif how == "a copy":
        teacher = copy.deepcopy(teacher)
    teacher.requires_grad_(False)
    reference = copy.deepcopy(Averaged(teacher.module))
    wrap = DistributedDataParallel if how == "in torch's" else pydist.DataParallel
    model = wrap(Averaged(teacher))
    model(batch(rank, 5, 4)).sin().mean().backward()
    for r in range(size):
        (reference(batch(r, 5, 4)).sin().mean() / size).backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (expected.grad is None)
        if expected.grad is not None:
            assert_near(ours.grad, expected.grad)
    teacher.requires_grad_(True)
    said = "put around a pydist" if how == "in torch's" else "teacher of the module is a pydist"
    for _ in range(2):
        with pytest.raises(pydist.InvalidUsage, match=f"{said}.*requires_grad_\\(False\\)"):
            model(batch(rank, 5, 4))
    teacher.requires_grad_(False)
    model(batch(rank, 5, 4)).sin().mean().backward()


@pytest.mark.parametrize("how", ["trained before", "not trained", "a copy", "in torch's"])
def test_a_frozen_wrapper_may_be_a_part(run: Runner, how: str) -> None:
    run(hold_a_frozen_one, how)


def give_torch_what_it_does_not_train(how: str) -> None:
    rank, _ = joined()
    model = pydist.DataParallel(build())
    model(batch(rank, 5, 4)).sum().backward()
    head = nn.Linear(1, 1).double()
    both = nn.Sequential(model.module, head)
    if how == "frozen":
        model.requires_grad_(False)
    else:
        names = [name for name, _ in both.named_parameters() if name.startswith("0.")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, names)
    outer = DistributedDataParallel(both)
    outer(batch(rank, 5, 4)).sum().backward()
    model(batch(rank, 5, 4))
    if how == "ignored":
        model(batch(rank, 5, 4)).sum().backward()


@pytest.mark.parametrize("how", ["frozen", "ignored"])
def test_torch_may_have_what_it_does_not_train(three: Ranks, how: str) -> None:
    three.run(give_torch_what_it_does_not_train, how, timeout=LIMIT_S)


def put_another_into_it(kind: str) -> str:
    rank, _ = joined()
    model = pydist.DataParallel(build())
    model(batch(rank, 5, 4)).sum().backward()
    layer = nn.Linear(4, 4).double()
    if kind == "torch's":
        model.module[0] = DistributedDataParallel(layer)
    elif kind == "torch's, inserted":
        model.module.insert(1, DistributedDataParallel(layer))
    elif kind == "torch's around its own part":
        model.module[0] = DistributedDataParallel(model.module[0])
    else:
        model.module[0] = pydist.DataParallel(layer)
    for _ in range(2):  # as long as it is there
        with pytest.raises(pydist.InvalidUsage) as caught:
            model(batch(rank, 5, 4))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("torch's", "0 of the module is a torch DistributedDataParallel already"),
        ("torch's, inserted", "1 of the module is a torch DistributedDataParallel already"),
        (
            "torch's around its own part",
            "0 of the module is a torch DistributedDataParallel already",
        ),
        ("ours", "0 of the module is a pydist.DataParallel already"),
    ],
)
def test_another_wrapper_in_a_wrapped_model_raises(three: Ranks, kind: str, says: str) -> None:
    for message in three.run(put_another_into_it, kind, timeout=LIMIT_S):
        assert says in message


def give_the_plain_module_to_torch(how: str) -> None:
    """As errors tell to do: then torch's wrapper trains, and ours has retired."""
    rank, size = joined()
    reference, model = build(), pydist.DataParallel(build(), broadcast_buffers=False)
    if how == "compiled":
        model(batch(rank, 5, 4)).sum().backward()
        model.zero_grad()
    theirs = DistributedDataParallel(model.module, broadcast_buffers=False)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    forward = torch.compile(theirs, backend="eager") if how == "compiled" else theirs
    forward(batch(rank, 5, 4)).sin().mean().backward()
    for r in range(size):
        (reference(batch(r, 5, 4)).sin().mean() / size).backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, expected.grad)
    optimizer.step()
    with pytest.raises(pydist.InvalidUsage, match="given to torch's DistributedDataParallel"):
        model(batch(rank, 5, 4))


@pytest.mark.parametrize("how", ["plainly", "compiled"])
def test_torch_takes_over_the_plain_module(three: Ranks, how: str) -> None:
    three.run(give_the_plain_module_to_torch, how, timeout=LIMIT_S)


def fail_to_wrap(wrap: Any, how: str) -> None:
    """What raises while torch's wrapper is made leaves ours as it was; the next one trains."""
    rank, _ = joined()
    reference, model = build().eval(), pydist.DataParallel(build().eval())
    model(batch(rank, 5, 4)).sum().backward()
    model.zero_grad()
    head: nn.Module = nn.Linear(1, 1, bias=rank != 0).double()
    if how == "no shape":
        head = nn.LazyLinear(1)
    elif how == "after its reducer":
        head = nn.SyncBatchNorm(1).double()

    def wrap_and_run() -> None:  # replicate() makes its wrapper in the first forward
        wrap(nn.Sequential(model.module, head))(batch(rank, 5, 4))

    with pytest.raises((RuntimeError, ValueError)) as caught:
        wrap_and_run()
    assert not isinstance(caught.value, pydist.Error)

    def loss(net: nn.Module, r: int, step: int) -> Tensor:
        out: Tensor = net(batch(r, 5, 4, step=step)).sin().mean()
        return out

    train_like_reference(model, reference, loss)
    theirs = wrap(nn.Sequential(model.module, nn.Identity()))
    train_like_reference(model, reference, loss)
    theirs(batch(rank, 5, 4))
    with pytest.raises(pydist.InvalidUsage, match="given to torch's DistributedDataParallel"):
        model(batch(rank, 5, 4))


@pytest.mark.parametrize(
    ("wrap", "how"),
    [
        (DistributedDataParallel, "no shape"),
        (DistributedDataParallel, "ranks differ"),
        (DistributedDataParallel, "after its reducer"),
        (replicate, "no shape"),
        (replicate, "ranks differ"),
    ],
)
def test_a_wrapper_of_torchs_that_could_not_be_made(run: Runner, wrap: Any, how: str) -> None:
    run(fail_to_wrap, wrap, how)


def shard_by_torch(how: str) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    rank, _ = joined()

    def shard(module: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(
            module, device_id=torch.device("cpu"), use_orig_params=how != "flat"
        )

    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    if how == "inside":
        with pytest.raises(pydist.InvalidUsage) as caught:
            pydist.DataParallel(nn.Sequential(shard(net), nn.Linear(1, 1)))
        return str(caught.value)
    model = pydist.DataParallel(net)
    if how == "later inside":
        model.module[0] = shard(nn.Linear(4, 4))
    elif how == "the plain module":
        shard(model.module)
    else:
        with pytest.raises(pydist.InvalidUsage) as caught:
            shard(model if how == "flat" else nn.Sequential(model))
        model(batch(rank, 5, 4).float()).sum().backward()  # nothing is cut yet
        return str(caught.value)
    with pytest.raises(pydist.InvalidUsage) as caught:
        model(batch(rank, 5, 4).float())
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("inside", "0 of the module is a torch FullyShardedDataParallel already.*stage=2"),
        ("later inside", "0 of the module is a torch FullyShardedDataParallel already.*stage=2"),
        (
            "the plain module",
            r"0\.bias, 1\.weight and 1 more were given to torch's FullyShardedDataParallel",
        ),
        ("flat", "FullyShardedDataParallel, or fully_shard, was given a pydist.*stage=2"),
        ("around", "FullyShardedDataParallel, or fully_shard, was given a pydist.*stage=2"),
    ],
)
def test_fully_sharded_models_are_refused(three: Ranks, how: str, says: str) -> None:
    for message in three.run(shard_by_torch, how, timeout=LIMIT_S):
        assert re.search(says, message), message


def shard_fully(how: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, size = joined()
    mesh = init_device_mesh("cpu", (size,))
    net, head = build().eval(), nn.Linear(1, 1).double()
    if how == "inside":
        fully_shard(net[0], mesh=mesh)
        with pytest.raises(pydist.InvalidUsage) as caught:
            pydist.DataParallel(net)
        return str(caught.value)
    model = pydist.DataParallel(net)
    if how in ("itself", "around"):
        with pytest.raises(pydist.InvalidUsage) as caught:
            fully_shard(model if how == "itself" else nn.Sequential(model, head), mesh=mesh)
    elif how == "beside":
        fully_shard(head, mesh=mesh)
    else:
        fully_shard(model.module if how == "the plain module" else model.module[0], mesh=mesh)
        for _ in range(2):
            with pytest.raises(pydist.InvalidUsage) as caught:
                model(batch(rank, 5, 4))
        return str(caught.value)

    def loss(net: nn.Module, r: int, step: int) -> Tensor:
        out: Tensor = net(batch(r, 5, 4, step=step)).sin().mean()
        return out

    train_like_reference(model, build().eval(), loss)
    return "" if how == "beside" else str(caught.value)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("inside", "parameter 0.weight is a DTensor.*fully_shard"),
        ("itself", "fully_shard, was given a pydist.DataParallel or a model with one in it"),
        ("around", "fully_shard, was given a pydist.DataParallel or a model with one in it"),
        ("beside", ""),
        ("the plain module", "parameter 0.weight is a DTensor.*fully_shard"),
        ("a layer", "parameter 0.weight is a DTensor.*fully_shard"),
    ],
)
def test_what_fully_shard_takes_is_not_wrapped(three: Ranks, how: str, says: str) -> None:
    for message in three.run(shard_fully, how, timeout=LIMIT_S):
        assert re.search(says, message), message


def state_by_torchs_functions() -> None:
    """They ask for the parts as `fully_shard` does, to look whether anything is sharded."""
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    joined()
    model = pydist.DataParallel(build())
    before = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    assert set(before) == set(model.state_dict())
    set_model_state_dict(model, {name: value + 1 for name, value in before.items()})
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name] + 1)


def test_torchs_functions_of_states_are_not_refused(three: Ranks) -> None:
    three.run(state_by_torchs_functions, timeout=LIMIT_S)


def replicate_it() -> None:
    """torch's function of that name makes its wrapper in the first forward, beside the module."""
    rank, size = joined()
    reference, model = build().eval(), pydist.DataParallel(build().eval())
    replicate(model.module)
    model(batch(rank, 5, 4)).sin().mean().backward()
    for r in range(size):
        (reference(batch(r, 5, 4)).sin().mean() / size).backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert_near(ours.grad, expected.grad)
    with pytest.raises(pydist.InvalidUsage, match="given to torch's DistributedDataParallel"):
        model(batch(rank, 5, 4))


def test_a_module_that_torch_replicates(three: Ranks) -> None:
    three.run(replicate_it, timeout=LIMIT_S)


class CallsAnother(nn.Module):
    """Its forward runs a model that is none of its parts."""

    def __init__(self, other: list[nn.Module]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4, dtype=torch.float64)
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other[0](x) + self.fc(x).sum()
        return out


def train_beside_torch() -> None:
    """A wrapper of torch's that is active for another model stops nobody."""
    rank, _ = joined()
    reference, model = build(), pydist.DataParallel(build())
    outer = DistributedDataParallel(CallsAnother([model]))
    outer(batch(rank, 5, 4)).sum().backward()
    model.zero_grad()
    reference.load_state_dict(model.state_dict())

    def loss(net: nn.Module, r: int, step: int) -> Tensor:
        out: Tensor = net(batch(r, 5, 4, step=step)).sin().mean()
        return out

    with outer._inside_ddp_forward():
        train_like_reference(model, reference, loss)
    failures: list[BaseException] = []

    def forward_in_a_thread() -> None:
        try:
            with torch.no_grad():
                model(batch(rank, 5, 4))
        except BaseException as error:
            failures.append(error)

    with outer._inside_ddp_forward():
        thread = threading.Thread(target=forward_in_a_thread)
        thread.start()
        thread.join()
    assert not failures


def test_torch_around_another_model_stops_nobody(run: Runner) -> None:
    run(train_beside_torch)
