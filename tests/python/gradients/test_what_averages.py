"""Which backwards average: those from a forward of the wrapper that was to, as in torch's DDP."""

import asyncio
import contextlib
import copy
import gc
import inspect
import pickle
import random
import weakref
from collections.abc import AsyncIterator, Generator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch import Ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from training import LIMIT_S, TIME_LIMIT, Runner, assert_near, batch, joined

import pydist

pytestmark = TIME_LIMIT


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double()


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]


def check(ours: Sequence[Tensor | None], theirs: Sequence[Tensor | None]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            assert_near(a, b)


def local_and_mean(
    reference: nn.Module, step: int = 0
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of this rank's batch, and of the ranks' mean."""
    rank, size = joined()
    reference.zero_grad()
    reference(batch(rank, 5, 4, step=step)).sum().backward()
    local = gradients(reference)
    reference.zero_grad()
    for r in range(size):
        (reference(batch(r, 5, 4, step=step)).sum() / size).backward()
    return local, gradients(reference)


# --- beside torch --------------------------------------------------------------------------------


def decide_beside_torch(seed: int) -> None:
    rank, _ = joined()
    group = dist.new_group(backend="gloo")
    module = net()
    theirs = DistributedDataParallel(copy.deepcopy(module), process_group=group)
    ours = pydist.DataParallel(copy.deepcopy(module))
    choices = random.Random(seed)
    done: list[Any] = []
    for step in range(25):
        inside = [choices.random() < 0.5 for _ in range(2)]  # forward, backward
        by_attribute = choices.random() < 0.3
        past = choices.random() < 0.2
        clears = choices.choice([None, True, False])
        done.append((inside, by_attribute, past, clears))
        for model in (theirs, ours):
            if clears is not None:
                model.zero_grad(set_to_none=clears)

            def phase(
                is_inside: bool, model: Any = model, by_attribute: bool = by_attribute
            ) -> Any:
                if not by_attribute:
                    return model.no_sync() if is_inside else contextlib.nullcontext()
                model.require_backward_grad_sync = not is_inside
                return contextlib.nullcontext()

            with phase(inside[0]):
                loss = (model.module if past else model)(batch(rank, 5, 4, step=step)).sum()
            with phase(inside[1]):
                loss.backward()
            model.require_backward_grad_sync = True
        for a, b in zip(gradients(ours), gradients(theirs), strict=True):
            assert a is not None
            assert b is not None
            torch.testing.assert_close(
                a, b, rtol=1e-12, atol=1e-12, msg=lambda text: f"after {done}: {text}"
            )


@pytest.mark.parametrize("seed", range(3))
def test_what_averages_in_torch_averages(run: Runner, seed: int) -> None:
    run(decide_beside_torch, seed)


# --- past the wrapper ----------------------------------------------------------------------------


def go_past_the_wrapper() -> None:
    rank, _ = joined()
    reference = net()
    model = pydist.DataParallel(copy.deepcopy(reference))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local, mean = local_and_mean(reference)
    x = batch(rank, 5, 4)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        model.module(x).sum().backward()
        check(gradients(model), local)
        with pytest.raises(
            pydist.InvalidUsage,
            match=r"never averaged.*model\.module\(\.\.\.\).*outputs of model\(",
        ):
            optimizer.step()
        check([p.detach() for p in model.parameters()], before)
        model.sync_gradients()
        check(gradients(model), mean)
        model.zero_grad()
        model(x).sum().backward()
        check(gradients(model), mean)
    with model.no_sync():
        model.zero_grad()
        model(x).sum().backward()
    with pytest.raises(pydist.InvalidUsage, match=r"under no_sync\(\) and never averaged"):
        optimizer.step()


def test_a_backward_past_the_wrapper_is_the_ranks_own(run: Runner) -> None:
    run(go_past_the_wrapper)


class Opaque:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Hiding(nn.Module):
    """Whose outputs nobody can look into."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor) -> Opaque:
        return Opaque(self.net(x).sum())


def hide_the_outputs() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Hiding())
    local, mean = local_and_mean(net())
    x = batch(rank, 5, 4)
    for step in range(3):
        # The last forward decides.
        with model.no_sync(enabled=step == 1):
            output = model(x)
        model.zero_grad()
        output.value.backward()
        check(gradients(model), local if step == 1 else mean)
    model.zero_grad()
    model.module(x).value.backward()
    check(gradients(model), local)
    # As in torch's DDP, an averaging forward that went nowhere is still waited for.
    model(x)
    model.zero_grad()
    model.module(x).value.backward()
    check(gradients(model), mean)


def test_outputs_that_nobody_can_look_into(run: Runner) -> None:
    run(hide_the_outputs)


# --- several forwards in one backward ------------------------------------------------------------


def mix_forwards() -> None:
    rank, size = joined()
    reference = net()
    model = pydist.DataParallel(copy.deepcopy(reference))
    for order in range(2):
        losses = []
        for number in range(2):
            with model.no_sync(enabled=number == order):
                losses.append(model(batch(rank, 5, 4, step=number)).sum())
        rounds = model.stats().rounds
        model.zero_grad()
        torch.stack(losses).sum().backward()
        assert model.stats().rounds == rounds + 1
        reference.zero_grad()
        for r in range(size):
            for number in range(2):
                (reference(batch(r, 5, 4, step=number)).sum() / size).backward()
        check(gradients(model), gradients(reference))
        # And each by itself, twice.
        for number in (order, 1 - order):
            with model.no_sync(enabled=number == order):
                loss = model(batch(rank, 5, 4, step=number)).sum()
            local, mean = local_and_mean(reference, step=number)
            expected = local if number == order else mean
            for again in range(2):
                model.zero_grad()
                loss.backward(retain_graph=again == 0)
                check(gradients(model), expected)


def test_an_averaging_forward_beside_one_that_is_not(run: Runner) -> None:
    run(mix_forwards)


class Early(nn.Module):
    """Whose gradients come to one parameter before the other output is reached."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Linear(4, 4).double() for _ in range(4))

    def forward(self, x: Tensor, which: int) -> Tensor:
        out: Tensor = self.layers[which](x).tanh()
        return out


def leave_a_forward_out() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(nn.Linear(3, 1))
    for _ in range(2):
        model(torch.ones(1, 3))
        with model.no_sync():
            model(torch.full((1, 3), float(rank))).sum().backward()
        torch.testing.assert_close(model.weight.grad, torch.full((1, 3), float(rank)))
        model.zero_grad()


def test_a_forward_without_backward_is_warned_of() -> None:
    with Ranks(2, {"PYDIST_BACKEND": "native"}) as ranks:
        for outcome in ranks.outcomes(leave_a_forward_out, timeout=LIMIT_S):
            assert outcome.ok, outcome.describe()
            assert outcome.output.count("earlier forward outside of no_sync()") == 1


def decide_within_a_backward() -> None:
    """After gradients of the other forward have arrived, in another plan as well."""
    rank, size = joined()
    reference = Early()
    model = pydist.DataParallel(copy.deepcopy(reference), bucket_cap_mb=1e-6)
    for step in range(9):
        model.zero_grad(set_to_none=step % 2 == 0)
        x = batch(rank, 5, 4, step=step)
        y = model(x, 0)
        with model.no_sync():
            y = model(model(y, 1 + step % 3), 3)
        y.sum().backward()
        reference.zero_grad()
        for r in range(size):
            y = reference(batch(r, 5, 4, step=step), 0)
            (reference(reference(y, 1 + step % 3), 3).sum() / size).backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            if theirs.grad is not None:
                assert_near(ours.grad, theirs.grad)
        assert model.stats().rounds == step + 1


def test_a_backward_that_comes_to_an_averaging_forward_late(run: Runner) -> None:
    run(decide_within_a_backward)


def decide_for_each_model() -> None:
    rank, _ = joined()
    reference = net()
    models = [pydist.DataParallel(copy.deepcopy(reference)) for _ in range(2)]
    local, mean = local_and_mean(reference)
    losses = []
    for number, model in enumerate(models):
        with model.no_sync(enabled=number == 1):
            losses.append(model(batch(rank, 5, 4)).sum())
    torch.stack(losses).sum().backward()
    check(gradients(models[0]), mean)
    check(gradients(models[1]), local)


def test_each_model_of_one_backward_decides_for_itself(run: Runner) -> None:
    run(decide_for_each_model)


def checkpoint_the_wrapper(reentrant: bool) -> None:
    rank, _ = joined()
    reference = net()
    model = pydist.DataParallel(copy.deepcopy(reference))
    local, mean = local_and_mean(reference)
    x = batch(rank, 5, 4).requires_grad_()
    for averages in (True, False, True):
        model.zero_grad()
        with model.no_sync(enabled=not averages):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        check(gradients(model), mean if averages else local)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_wrapper(run: Runner, reentrant: bool) -> None:
    run(checkpoint_the_wrapper, reentrant)


def decide_with_shards() -> None:
    rank, _ = joined()
    reference = net()
    for stage in (1, 2):
        model = pydist.DataParallel(copy.deepcopy(reference))
        optimizer = pydist.ShardedOptimizer(model, torch.optim.SGD, stage=stage, lr=0.0)
        local, mean = local_and_mean(reference)
        x = batch(rank, 5, 4)
        loss = model(x).sum()
        with model.no_sync():
            loss.backward()
        optimizer.step()
        check([optimizer.gradient_of(p) for p in model.parameters()], mean)
        optimizer.zero_grad()
        with model.no_sync():
            loss = model(x).sum()
        loss.backward()
        check(gradients(model), local)
        model.sync_gradients()
        optimizer.step()
        check([optimizer.gradient_of(p) for p in model.parameters()], mean)


def test_the_forward_decides_with_shards(run: Runner) -> None:
    run(decide_with_shards)


# --- methods of the module -----------------------------------------------------------------------


class Encoder(nn.Module):
    """With methods that people call beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.cyclic: list[Any] = []
        self.cyclic.append(self.cyclic)

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)["out"]

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """What it encodes."""
        return {"out": self.net(x)}

    @torch.no_grad()
    def predict(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    async def encode_later(self, x: Tensor) -> Tensor:
        await asyncio.sleep(0)
        return self.encode(x)["out"]

    def encode_rows(self, x: Tensor) -> Generator[Tensor, float, str]:
        factor = 1.0
        for row in x.split(1):
            try:
                factor = (yield self.encode(row)["out"] * factor) or factor
            except ZeroDivisionError:
                yield self.encode(row)["out"] * 0
        return "all"

    async def encode_as_they_come(self, x: Tensor) -> AsyncIterator[Tensor]:
        yield self.encode(x)["out"]

    def everything(self) -> list[Any]:
        return self.cyclic

    @classmethod
    def name_of_class(cls) -> str:
        return cls.__name__


def call_methods(is_compiled: bool) -> None:
    rank, _ = joined()
    reference = Encoder()
    module = copy.deepcopy(reference)
    model = pydist.DataParallel(module)
    local, mean = local_and_mean(reference)
    x = batch(rank, 5, 4)
    encode: Any = model.encode
    if is_compiled:
        torch._dynamo.reset()
        encode = torch.compile(encode, backend="aot_eager")
    for averages in (True, False, True):
        model.zero_grad()
        with model.no_sync(enabled=not averages):
            loss = encode(x)["out"].sum()
        loss.backward()
        check(gradients(model), mean if averages else local)
    model.zero_grad()
    model.module.encode(x)["out"].sum().backward()
    check(gradients(model), local)


@pytest.mark.parametrize("is_compiled", [False, True])
def test_methods_average(run: Runner, is_compiled: bool) -> None:
    run(call_methods, is_compiled)


def call_odd_methods() -> None:
    rank, _ = joined()
    reference = Encoder()
    model = pydist.DataParallel(copy.deepcopy(reference))
    _, mean = local_and_mean(reference)
    x = batch(rank, 5, 4)

    def averaged(loss: Tensor) -> None:
        model.zero_grad()
        loss.backward()
        check(gradients(model), mean)

    assert inspect.iscoroutinefunction(model.encode_later)
    averaged(asyncio.run(model.encode_later(x)).sum())
    assert inspect.isgeneratorfunction(model.encode_rows)
    rows = model.encode_rows(x)
    parts = [next(rows), rows.send(1.0), rows.throw(ZeroDivisionError())]
    parts[-1] = rows.send(1.0)
    parts += rows
    averaged(torch.cat([parts[0], parts[1], *parts[2:]]).sum() + 0 * model(x).sum())
    # Each of several backwards, too.
    model.zero_grad()
    for row in model.encode_rows(x):
        row.sum().backward()
    check(gradients(model), mean)

    def all_rows() -> Generator[Tensor, None, None]:
        returned = yield from model.encode_rows(x)
        assert returned == "all"

    assert len(list(all_rows())) == 5

    async def first() -> Tensor:
        async for out in model.encode_as_they_come(x):
            return out.sum()
        raise AssertionError

    averaged(asyncio.run(first()))
    assert not model.predict(x).requires_grad
    assert model.everything() is model.cyclic
    assert model.name_of_class() == "Encoder"


def test_methods_of_all_kinds(run: Runner) -> None:
    run(call_odd_methods)


def be_a_method() -> None:
    rank, _ = joined()
    module = Encoder()
    model = pydist.DataParallel(module)
    assert model.encode == model.encode
    assert hash(model.encode) == hash(model.encode)
    assert model.encode != model.everything
    assert inspect.ismethod(model.encode)
    assert model.encode.__self__ is module
    assert model.encode.__doc__ == "What it encodes."
    assert str(inspect.signature(model.encode)) == str(inspect.signature(module.encode))
    x = batch(rank, 5, 4)
    copied = pickle.loads(pickle.dumps(model.encode))
    assert torch.equal(copied(x)["out"], module.encode(x)["out"])
    # Of the module's own, where a method is replaced.
    module.encode = lambda x: {"out": x}  # type: ignore[method-assign]
    assert model.encode(x)["out"] is x
    # A method keeps the module, and not the wrapper.
    predict = model.predict
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert predict(x).shape == (5, 1)


def test_methods_stay_methods(run: Runner) -> None:
    run(be_a_method)
