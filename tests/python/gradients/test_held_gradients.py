"""Gradients that the program keeps, or has put into `parameter.grad` itself: as in torch's DDP."""

import contextlib
import copy
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gpu_ranks
import pytest
import torch
import torch.distributed as dist
from launch import Ranks, run_ranks
from thorough import everyday
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from training import LIMIT_S, TIME_LIMIT, Branches, Parts, Runner, Tied, batch, joined
from twins import ManyKinds

import pydist

pytestmark = TIME_LIMIT

STEPS = 9  # plans change after the 1st, 2nd, 4th and 8th


@pytest.fixture(
    scope="module", params=everyday("native-3", thorough=("native-2", "gloo-2", "gloo-3"))
)
def some_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    backend, count = request.param.split("-")
    with Ranks(int(count), {"PYDIST_BACKEND": backend}) as ranks:
        yield ranks


@pytest.fixture
def run_on_some(some_ranks: Ranks) -> Runner:
    return lambda function, *args: some_ranks.run(function, *args, timeout=LIMIT_S)


# What a program finds, in order.
Found = list[Any]
Program = Callable[[Any, int, int], Found]


class Moody(nn.Module):
    """Whose branches come in another order in some forwards, so that plans change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Linear(4, 6, dtype=torch.float64)
        self.branches = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(4))
        self.last = nn.Linear(6, 2, dtype=torch.float64)

    def forward(self, x: Tensor, order: Sequence[int] = (0, 1, 2, 3)) -> Tensor:
        x = self.trunk(x).tanh()
        for number in order:
            x = self.branches[number](x).tanh()
        out: Tensor = self.last(x)
        return out.sin().mean()


def order_of(step: int) -> tuple[int, ...]:
    return ((0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1))[min(step, 8) // 2 % 3]


def beside_torch(program: Program, module: nn.Module, *, uses_hook: bool = False) -> None:
    """Runs a program on torch's DDP, and on ours with small buckets and with one."""
    rank, size = joined()
    group = dist.new_group(backend="gloo")
    theirs = DistributedDataParallel(
        copy.deepcopy(module), process_group=group, find_unused_parameters=True
    )
    models = [
        pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=cap_mb) for cap_mb in (1e-6, 1.0)
    ]
    if uses_hook:
        theirs.register_comm_hook(group, allreduce_hook)
        for model in models:
            model.register_comm_hook(group, allreduce_hook)
    expected = program(theirs, rank, size)
    for model in models:
        compare(program(model, rank, size), expected)


def compare(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs), (ours, theirs)
    if isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for a, b in zip(ours, theirs, strict=True):
            compare(a, b)
    elif isinstance(ours, Tensor):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    else:
        assert ours == theirs


def inner(model: Any) -> Any:
    return model.module


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def values_of(held: Sequence[Any]) -> list[Tensor | None]:
    """Copies, of what a program has kept."""
    return [None if kept is None else torch.as_tensor(kept).clone().reshape(-1) for kept in held]


# --- what is held keeps its values ---------------------------------------------------------------


WAYS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda gradient: gradient,
    "detach": lambda gradient: gradient.detach(),
    "data": lambda gradient: gradient.data,
    "view": lambda gradient: gradient.view(-1),
    "slice": lambda gradient: gradient[:1],
    "numpy": lambda gradient: gradient.numpy(),
    "numpy of a view": lambda gradient: gradient.view(-1)[1:].numpy(),
    "dlpack": torch.from_dlpack,
    "storage": lambda gradient: gradient.untyped_storage(),
    "deepcopy": copy.deepcopy,
}


def as_kept(kept: Any) -> Any:
    if isinstance(kept, torch.UntypedStorage):
        return torch.empty(0, dtype=torch.float64).set_(kept)  # type: ignore[call-overload]
    return kept


def keep(way: str) -> None:
    """The gradients of two losses beside each other, as in gradient surgery."""

    def program(model: Any, rank: int, _size: int) -> Found:
        found: Found = []
        for step in range(STEPS):
            held: list[list[Any]] = []
            for loss in range(3):
                model.zero_grad()
                model(batch(rank, 5, 4, step=10 * step + loss), order_of(step)).backward()
                held.append([WAYS[way](g) for g in gradients(model) if g is not None])
            found += [values_of(map(as_kept, kept)) for kept in held]
        return found

    beside_torch(program, Moody())


@pytest.mark.parametrize("way", WAYS)
def test_held_gradients_keep_their_values(run_on_some: Runner, way: str) -> None:
    run_on_some(keep, way)


def test_held_gradients_of_one_rank() -> None:
    run_ranks(keep, 1, "view", timeout=LIMIT_S)


def keep_for_long(uses_hook: bool) -> None:
    """Some of the gradients of the last steps, with gaps, while plans change."""

    def program(model: Any, rank: int, _size: int) -> Found:
        held: list[Tensor] = []
        found: Found = []
        for step in range(2 * STEPS):
            model.zero_grad(set_to_none=step % 5 != 4)
            model(batch(rank, 5, 4, step=step), order_of(step)).backward()
            held += [
                g
                for number, g in enumerate(gradients(model))
                if g is not None and (number + step) % 3 == 0
            ]
            held = held[-12:] if step % 4 else held[-5:]
            found.append(values_of(held))
            found.append(values_of(gradients(model)))
        return found

    beside_torch(program, Moody(), uses_hook=uses_hook)


@pytest.mark.parametrize("uses_hook", [False, True])
def test_gradients_are_held_while_plans_change(run_on_some: Runner, uses_hook: bool) -> None:
    run_on_some(keep_for_long, uses_hook)


def keep_what_is_not_used() -> None:
    """Ranks take different branches, so a rank sends zeros for what it holds."""

    def program(model: Any, rank: int, size: int) -> Found:
        held: list[list[Tensor | None]] = []
        for step in range(STEPS):
            model.zero_grad(set_to_none=step % 4 != 3)
            model(batch(rank, 5, 4, step=step), (rank + step) % size).backward()
            held.append(gradients(model))
        return [values_of(kept) for kept in held]

    beside_torch(program, Branches(4))


def test_held_gradients_of_unused_parameters(run_on_some: Runner) -> None:
    run_on_some(keep_what_is_not_used)


def accumulate_in_place() -> None:
    def program(model: Any, rank: int, _size: int) -> Found:
        found: Found = []
        for step in range(STEPS):
            if step % 3 == 0:
                model.zero_grad()
            averages = step % 2 == 0
            with contextlib.nullcontext() if averages else model.no_sync():
                model(batch(rank, 5, 4, step=step)).backward()
            held = gradients(model)
            array = inner(model).trunk.weight.grad.numpy()
            with model.no_sync():
                model(batch(rank, 5, 4, step=step + 100)).backward()
            model(batch(rank, 5, 4, step=step + 200)).backward()
            assert all(a is b for a, b in zip(held, gradients(model), strict=True))
            found += [values_of(held), torch.as_tensor(array).clone()]
        return found

    beside_torch(program, Moody())


def test_gradients_accumulate_in_place(run_on_some: Runner) -> None:
    run_on_some(accumulate_in_place)


# --- gradients of the program's own --------------------------------------------------------------


def project_conflicts() -> None:
    """PCGrad: each task's gradient loses what conflicts with the others'."""

    def program(model: Any, rank: int, _size: int) -> Found:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(STEPS):
            tasks: list[list[Tensor]] = []
            for task in range(3):
                optimizer.zero_grad()
                model(batch(rank, 5, 4, step=10 * step + task), order_of(step)).backward()
                tasks.append([g for g in gradients(model) if g is not None])
            flat = [torch.cat([g.flatten() for g in task]) for task in tasks]
            merged = torch.zeros_like(flat[0])
            for own in flat:
                projected = own.clone()
                for other in flat:
                    conflict = projected @ other
                    if conflict < 0:
                        projected -= conflict / (other @ other) * other
                merged += projected
            begin = 0
            for parameter in model.parameters():
                end = begin + parameter.numel()
                parameter.grad = merged[begin:end].view_as(parameter)
                begin = end
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    beside_torch(program, Moody())


def test_gradient_surgery(run_on_some: Runner) -> None:
    run_on_some(project_conflicts)


def into_flat(model: nn.Module) -> Tensor:
    """Makes the gradients views of one buffer."""
    parameters = list(model.parameters())
    count = sum(p.numel() for p in parameters)
    flat = torch.zeros(count, dtype=torch.float64, device=parameters[0].device)
    begin = 0
    for parameter in parameters:
        parameter.grad = flat[begin : begin + parameter.numel()].view_as(parameter)
        begin += parameter.numel()
    return flat


def use_a_flat_buffer(uses_hook: bool) -> None:
    def program(model: Any, rank: int, _size: int) -> Found:
        flat = into_flat(model)
        before = gradients(model)
        found: Found = []
        for step in range(STEPS):
            flat.zero_()
            with model.no_sync():
                model(batch(rank, 5, 4, step=step), order_of(step)).backward()
            model(batch(rank, 5, 4, step=step + 100), order_of(step)).backward()
            assert all(a is b for a, b in zip(before, gradients(model), strict=True))
            found.append(flat.clone())
            flat /= flat.norm().clamp(min=1.0)
            with torch.no_grad():
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    parameter -= 0.1 * parameter.grad
        # Who forgets the buffer gets gradients as ever.
        del flat, before
        for step in range(3):
            model.zero_grad(set_to_none=step > 0)
            model(batch(rank, 5, 4, step=step)).backward()
            found.append(values_of(gradients(model)))
        return found

    beside_torch(program, Moody(), uses_hook=uses_hook)


@pytest.mark.parametrize("uses_hook", [False, True])
def test_a_flat_buffer_of_gradients(run_on_some: Runner, uses_hook: bool) -> None:
    run_on_some(use_a_flat_buffer, uses_hook)


def put_gradients_back() -> None:
    """Of an earlier step, which then take part; and of other layouts."""

    def program(model: Any, rank: int, _size: int) -> Found:
        found: Found = []
        old: list[Tensor | None] = []
        for step in range(STEPS):
            model.zero_grad()
            model(batch(rank, 5, 4, step=step), order_of(step)).backward()
            new = gradients(model)
            if step % 2:
                for parameter, gradient in zip(model.parameters(), old, strict=True):
                    parameter.grad = gradient
                model(batch(rank, 5, 4, step=step + 50), order_of(step)).backward()
                assert all(a is b for a, b in zip(old, gradients(model), strict=True))
            if step % 3 == 2:
                wide = torch.ones(4, 6, dtype=torch.float64)
                inner(model).trunk.weight.grad = wide.t()
                model(batch(rank, 5, 4, step=step + 70), order_of(step)).backward()
                found.append(wide.clone())
            old = new
            found += [values_of(old), values_of(gradients(model))]
        return found

    beside_torch(program, Moody())


def test_gradients_that_are_put_back(run_on_some: Runner) -> None:
    run_on_some(put_gradients_back)


def share_memory() -> None:
    """With other processes: gradients move into other memory, with all who hold them."""

    def program(model: Any, rank: int, _size: int) -> Found:
        held: list[Tensor | None] = []
        found: Found = []
        for step in range(STEPS):
            model.zero_grad(set_to_none=step % 4 != 3)
            if step % 3 == 1:
                inner(model).share_memory()
            model(batch(rank, 5, 4, step=step), order_of(step)).backward()
            if step % 3 != 0:
                held += gradients(model)[step % 2 :: 2]
                inner(model).share_memory()
                model(batch(rank, 5, 4, step=step + 50), order_of(step)).backward()
            found += [values_of(held[-9:]), values_of(gradients(model))]
        return found

    beside_torch(program, Moody())


def test_gradients_in_shared_memory(run_on_some: Runner) -> None:
    run_on_some(share_memory)


class Acts:
    """A random program: what a loop does to gradients, with what it keeps of them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __call__(self, model: Any, rank: int, size: int) -> Found:
        choices = random.Random(self.seed)
        alone = random.Random(1000 * self.seed + rank)  # what other ranks do otherwise
        held: list[Any] = []
        found: Found = []
        number = 100 * self.seed
        is_pending = False
        for _ in range(30):
            act = choices.choice(
                ["backward"] * 4 + ["accumulate", "none", "none", "zero", "scale", "put", "flat"]
            )
            number += 1
            if act in ("backward", "accumulate"):
                # An order that all ranks share, or branches that a rank leaves out. After no_sync()
                # all of them, or torch's DDP waits for ever, or raises.
                order = choices.choice([(0, 1, 2, 3), (3, 1, 0, 2), (1, 0)])
                own_order = tuple(alone.sample(range(4), 2))
                if is_pending:
                    order = (2, 0, 1, 3)
                elif act == "backward" and choices.random() < 0.4:
                    order = own_order
                is_pending = act == "accumulate"
                with model.no_sync() if act == "accumulate" else contextlib.nullcontext():
                    model(batch(rank, 3, 4, step=number), order).backward()
            elif act in ("none", "zero"):
                model.zero_grad(set_to_none=act == "none")
            elif act == "scale":
                for gradient in gradients(model):
                    if gradient is not None:
                        gradient.mul_(0.5)
            elif act == "flat":
                held.append(into_flat(model))
            else:
                # The same on all ranks: where no rank's backward reaches the parameter, torch's DDP
                # leaves it as it is, and ours averages it.
                for index, parameter in enumerate(model.parameters()):
                    if choices.random() < 0.3:
                        parameter.grad = batch(0, *parameter.shape, step=number + index)
                        held += [parameter.grad] if choices.random() < 0.5 else []
            keeps = choices.random()
            if keeps < 0.5:
                for gradient in gradients(model):
                    if gradient is not None and choices.random() < 0.4:
                        held.append(choices.choice(list(WAYS.values())[:7])(gradient))
            if choices.random() < 0.3:
                held = choices.sample(held, len(held) // 3)
            found += [act, values_of(held), values_of(gradients(model))]
        return found


def act_at_random(first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 4):
        beside_torch(Acts(seed), Moody())


@pytest.mark.parametrize("first_seed", range(0, 8, 4))
def test_random_programs(run_on_some: Runner, first_seed: int) -> None:
    run_on_some(act_at_random, first_seed)


# --- sums, weights, uneven ranks -----------------------------------------------------------------


def keep_in_join() -> None:
    def program(model: Any, rank: int, _size: int) -> Found:
        flat = into_flat(model)
        held: list[list[Tensor | None]] = []
        with model.join():
            for step in range(4 + 2 * rank):
                flat.zero_()
                if step == 3:
                    model.zero_grad()
                model(batch(rank, 5, 4, step=step), order_of(step)).backward()
                held.append(gradients(model))
                if step >= 3:
                    model.zero_grad()
        return [flat.clone(), *(values_of(kept) for kept in held[:4])]

    beside_torch(program, Moody())


def test_held_gradients_in_join(run_on_some: Runner) -> None:
    run_on_some(keep_in_join)


def keep_beside_plain(kind: str) -> None:
    """What torch's DDP has not: beside the same without holders."""
    rank, size = joined()
    reduction: Any = "sum" if kind == "sums" else "mean"
    module = Moody()
    held_by, plain = (
        pydist.DataParallel(copy.deepcopy(module), bucket_cap_mb=1e-6, reduction=reduction)
        for _ in range(2)
    )
    models = [held_by, plain]
    flat = torch.zeros(0)
    held: list[tuple[Any, Tensor]] = []
    for step in range(2 * STEPS):
        if step % 6 == 0:
            flat = into_flat(held_by)
            for parameter in plain.parameters():
                parameter.grad = torch.zeros_like(parameter)
        elif step % 6 == 4:
            for model in models:
                model.zero_grad()
        for micro in range(2):
            for model in models:
                weight = model.weighted(rank + step) if kind == "weights" else None
                order = order_of(step)[: 2 + (rank + step) % size]
                with (
                    model.no_sync(enabled=micro == 0),
                    weight if weight is not None else contextlib.nullcontext(),
                ):
                    model(batch(rank, 5, 4, step=10 * step + micro), order).backward()
        compare(gradients(held_by), gradients(plain))
        if step % 6 < 4:
            begin = 0
            for parameter in held_by.parameters():
                part = flat[begin : begin + parameter.numel()]
                assert parameter.grad is not None
                assert parameter.grad.data_ptr() == part.data_ptr()
                begin += parameter.numel()
        else:
            held += [(g, g.clone()) for g in gradients(held_by) if g is not None]
            for model in models:
                model.zero_grad()
        held = held[-15:]
        for kept, value in held:
            assert torch.equal(kept, value)


@pytest.mark.parametrize("kind", ["sums", "weights"])
def test_held_gradients_with_sums_and_weights(run_on_some: Runner, kind: str) -> None:
    run_on_some(keep_beside_plain, kind)


# --- all kinds of gradients ----------------------------------------------------------------------


def keep_many_kinds(arguments: dict[str, Any]) -> None:
    """Beside a model whose gradients are views, to the bit where memory does not matter."""
    rank, _ = joined()
    torch.manual_seed(7)
    module = ManyKinds()
    module.single.data = module.single.data.to(torch.bfloat16)
    held_by, plain = (
        pydist.DataParallel(
            copy.deepcopy(module), gradient_as_bucket_view=is_view, bucket_cap_mb=0.001, **arguments
        )
        for is_view in (False, True)
    )
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        for model in (held_by, plain):
            model.zero_grad()
            model(batch(rank, 60, step=step).float()).sum().backward()
        for ours, theirs in zip(held_by.parameters(), plain.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if ours.grad is not None and theirs.grad is not None:
                assert ours.grad.stride() == theirs.grad.stride()
                torch.testing.assert_close(ours.grad, theirs.grad)
        held += [(g, g.clone()) for g in gradients(held_by) if g is not None]
        held = held[-14:]
        for kept, value in held:
            assert torch.equal(kept, value)


@pytest.mark.parametrize("arguments", [{}, {"compress": "bf16"}, {"reduction": "sum"}])
def test_all_kinds_of_gradients_can_be_held(run_on_some: Runner, arguments: dict[str, Any]) -> None:
    run_on_some(keep_many_kinds, arguments)


# --- home again, and at no cost ------------------------------------------------------------------


def places(model: Any) -> list[int]:
    return [g.data_ptr() for g in gradients(model) if g is not None]


def come_home() -> None:
    rank, _ = joined()
    model = pydist.DataParallel(Tied(torch.float64))
    step = 0

    def backward() -> list[Tensor]:
        nonlocal step
        step += 1
        model.zero_grad()
        model(batch(rank, 6, 8, step=step)).mean().backward()
        return [g for g in gradients(model) if g is not None]

    for _ in range(4):  # until the plan stays
        backward()
    home = places(model)
    plan = [bucket.parameters for bucket in model.plan.buckets]
    assert model.stats().copied_bytes == 0
    held = backward()
    assert places(model) == home
    copies = [kept.clone() for kept in held]
    new = backward()
    assert not set(places(model)) & set(home)
    assert all(torch.equal(*pair) for pair in zip(held, copies, strict=True))
    assert model.stats().copied_bytes > 0
    # What is held no more is home again with the next gradient, also where that one is held.
    del held
    assert backward()[0].data_ptr() == home[0]
    assert places(model) == home
    del new
    model.reset_stats()
    backward()
    assert places(model) == home
    assert model.stats().copied_bytes == 0
    # A gradient that the program has put moves in once nobody else has it.
    buffer = torch.zeros_like(model.module.inside.weight)
    model.zero_grad()
    model.module.inside.weight.grad = buffer
    model(batch(rank, 6, 8)).mean().backward()
    assert model.module.inside.weight.grad.data_ptr() == buffer.data_ptr()
    del buffer
    model.zero_grad(set_to_none=False)
    model(batch(rank, 6, 8)).mean().backward()
    assert sorted(places(model)) == sorted(home)
    assert [bucket.parameters for bucket in model.plan.buckets] == plan


def test_gradients_come_home(run_on_some: Runner) -> None:
    run_on_some(come_home)


def come_home_across_plans() -> None:
    """What was held when the plan changed lies in other gradients' homes."""
    rank, _ = joined()
    for cap_mb in (1e-6, 1.0):
        model = pydist.DataParallel(Moody(), bucket_cap_mb=cap_mb)
        held: list[tuple[Tensor, Any, Tensor]] = []
        plans: list[Any] = []
        for step in range(2 * STEPS):
            model.zero_grad(set_to_none=step % 3 == 0)
            model(batch(rank, 5, 4, step=step), order_of(step)).backward()
            held += [(g, g.numpy(), g.clone()) for g in gradients(model) if g is not None]
            for kept, array, value in held:
                if kept.data_ptr() not in places(model):
                    assert torch.equal(kept, value)
                assert torch.equal(kept, torch.as_tensor(array))
            held = [entry for entry in held if entry[0].data_ptr() not in places(model)]
            held = held[-30:]
            plans.append([bucket.parameters for bucket in model.plan.buckets])
        if cap_mb < 1:
            assert any(a != b for a, b in itertools.pairwise(plans)), "no plan changed"
        held.clear()
        del kept, array, value
        for step in range(3):
            model.zero_grad(set_to_none=False)
            model(batch(rank, 5, 4, step=step), order_of(8)).backward()
        model.reset_stats()
        before = places(model)
        for _ in range(2):
            model.zero_grad()
            model(batch(rank, 5, 4), order_of(8)).backward()
            assert places(model) == before
        assert model.stats().copied_bytes == 0


def test_gradients_come_home_across_plans(run_on_some: Runner) -> None:
    run_on_some(come_home_across_plans)


def take_no_memory() -> None:
    """Where nobody holds anything: no more is allocated, and nothing copied, than for views."""
    rank, _ = joined()
    counts = []
    for is_view in (True, False):
        torch.manual_seed(1)
        model = pydist.DataParallel(
            Tied(torch.float64), gradient_as_bucket_view=is_view, bucket_cap_mb=1e-6
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            model(batch(rank, 6, 8, step=step)).mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            for step in range(6):
                model(batch(rank, 6, 8, step=step)).mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        events = profile.events() or []
        counts.append(
            (
                sum(event.name == "[memory]" for event in events),
                sum(event.name == "aten::copy_" for event in events),
            )
        )
        assert model.stats().copied_bytes == 0
    assert counts[0] == counts[1]
    assert counts[0][1] > 0


def test_nothing_is_copied_or_allocated_where_nobody_holds(run_on_some: Runner) -> None:
    run_on_some(take_no_memory)


def write_into_views() -> None:
    """What `gradient_as_bucket_view=True` means, in torch's documentation as well."""
    rank, size = joined()
    model = pydist.DataParallel(
        nn.Linear(4, 2, bias=False, dtype=torch.float64), gradient_as_bucket_view=True
    )
    model(batch(rank, 5, 4)).sum().backward()
    first = model.weight.grad
    model.zero_grad()
    model(batch(rank, 5, 4, step=1)).sum().backward()
    expected = torch.stack([batch(r, 5, 4, step=1).sum(0) for r in range(size)]).mean(0)
    for found in (first, model.weight.grad):
        torch.testing.assert_close(found, expected.expand(2, 4))
    assert first.data_ptr() == model.weight.grad.data_ptr()
    assert model.stats().copied_bytes == 0


def test_gradients_may_be_views(run_on_some: Runner) -> None:
    run_on_some(write_into_views)


# --- what goes wrong, and what comes later -------------------------------------------------------


def raise_while_held(cap_mb: float) -> None:
    rank, size = joined()
    model = pydist.DataParallel(Moody(), bucket_cap_mb=cap_mb)
    reference = copy.deepcopy(model)
    held: list[tuple[Tensor, Any, Tensor]] = []

    def explode(_: Tensor) -> None:
        raise ValueError("in the middle of backward")

    for step in range(STEPS):
        model.zero_grad()
        loss = model(batch(rank, 5, 4, step=step), order_of(step))
        if step % 3 == 2:
            handle = model.branches[1].weight.register_hook(explode) if rank == 1 else None
            with pytest.raises((ValueError, pydist.Error), match=r"in the middle|on rank 1"):
                loss.backward()
            if handle is not None:
                handle.remove()
        else:
            loss.backward()
            reference.zero_grad()
            for r in range(size):
                (reference(batch(r, 5, 4, step=step), order_of(step)) / size).backward()
            compare(gradients(model), gradients(reference))
            held += [(g, g.numpy(), g.clone()) for g in gradients(model) if g is not None]
        pydist.barrier()  # what was under way has arrived
        for kept, array, value in held:
            assert torch.equal(kept, value)
            assert torch.equal(torch.as_tensor(array), value)
        held = held[-20:]


@pytest.mark.parametrize("cap_mb", [1e-6, 1.0])
def test_a_backward_that_raises_leaves_what_is_held(run_on_some: Runner, cap_mb: float) -> None:
    run_on_some(raise_while_held, cap_mb)


def wrap_anew() -> None:
    rank, size = joined()
    module = Moody()
    model = pydist.DataParallel(module)
    model(batch(rank, 5, 4)).backward()
    held = [(g, g.clone()) for g in gradients(model)[:3] if g is not None]
    model = pydist.DataParallel(module)
    for step in range(4):
        model(batch(rank, 5, 4, step=step + 1)).backward()
    # Not those that the first wrapper alone still knew.
    model.zero_grad(set_to_none=False)
    model(batch(rank, 5, 4)).backward()
    model.reset_stats()
    model(batch(rank, 5, 4)).backward()
    held_bytes = sum(kept.nbytes for kept, _ in held)
    assert model.stats().copied_bytes == 2 * held_bytes, "in and out, of what is held alone"
    for (kept, _), parameter in zip(held, model.parameters(), strict=False):
        assert kept is parameter.grad
    assert size == pydist.world_size()


def test_a_model_that_is_wrapped_anew(run_on_some: Runner) -> None:
    run_on_some(wrap_anew)


def add_while_held() -> None:
    rank, size = joined()
    torch.manual_seed(5)
    module = Parts({"first": nn.Linear(4, 2, dtype=torch.float64)})
    model = pydist.DataParallel(module)
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        if step == 3:
            added = nn.Linear(4, 2, dtype=torch.float64)
            module["second"] = added
        for name in module:
            model.zero_grad()
            model(name, batch(rank, 5, 4, step=step)).sum().backward()
            gradient = module[name].weight.grad
            expected = torch.stack([batch(r, 5, 4, step=step).sum(0) for r in range(size)]).mean(0)
            torch.testing.assert_close(gradient, expected.expand(2, 4))
            held += [(gradient, gradient.clone())]
        for kept, value in held:
            assert torch.equal(kept, value)


def test_parameters_that_are_added_while_gradients_are_held(run_on_some: Runner) -> None:
    run_on_some(add_while_held)


def share_out_a_part() -> None:
    """Beside a sharded optimizer, which has other gradients of the model."""
    rank, size = joined()
    torch.manual_seed(5)
    module = Parts({name: nn.Linear(4, 2, dtype=torch.float64) for name in ("sharded", "whole")})

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = module

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.parts(name, x) for name in ("sharded", "whole")])

    model = pydist.DataParallel(Both())
    held: list[tuple[Tensor, Tensor]] = []
    for step in range(STEPS):
        if step == 2:
            optimizer = pydist.ShardedOptimizer(
                module["sharded"].parameters(), torch.optim.SGD, lr=0
            )
        model.zero_grad()
        model(batch(rank, 5, 4, step=step)).sum().backward()
        expected = torch.stack([batch(r, 5, 4, step=step).sum(0) for r in range(size)]).mean(0)
        gradient = module["whole"].weight.grad
        torch.testing.assert_close(gradient, expected.expand(2, 4))
        held += [(gradient, gradient.clone())]
        if step < 2:
            gradient = module["sharded"].weight.grad
            held += [(gradient, gradient.clone())]
            del gradient
            model.zero_grad()
        else:
            weight = module["sharded"].weight
            torch.testing.assert_close(optimizer.gradient_of(weight), expected.expand(2, 4))
            optimizer.step()
        for kept, value in held:
            assert torch.equal(kept, value)


def test_held_gradients_beside_a_sharded_optimizer(run_on_some: Runner) -> None:
    run_on_some(share_out_a_part)


# --- on GPUs, where the holder moves -------------------------------------------------------------


def keep_on_a_gpu(uses_hook: bool) -> None:
    gpu_ranks.install(delay_us=100)
    rank, size = joined()
    reference = Moody()
    model = pydist.DataParallel(copy.deepcopy(reference).to("cuda"), bucket_cap_mb=1e-6)
    if uses_hook:
        model.register_comm_hook(None, allreduce_hook)
    home: list[int] = []
    held: list[tuple[Tensor, Tensor, Tensor]] = []
    flat = torch.zeros(0)
    for step in range(2 * STEPS):
        is_flat = step % 6 in (2, 3)
        order = order_of(step)[: 3 + (rank + step) % 2]
        if step % 6 == 2:
            flat = into_flat(model)
        elif is_flat:
            flat.zero_()
        else:
            model.zero_grad()
        for micro in range(2):
            x = batch(rank, 5, 4, step=10 * step + micro).to("cuda")
            with model.no_sync(enabled=micro == 0):
                model(x, order).backward()
        reference.zero_grad()
        for r in range(size):
            order = order_of(step)[: 3 + (r + step) % 2]
            for micro in range(2):
                x = batch(r, 5, 4, step=10 * step + micro)
                (reference(x, order) / size).backward()
        found = [g for g in gradients(model) if g is not None]
        if is_flat:
            expected = torch.cat([g.flatten() for g in gradients(reference) if g is not None])
            compare(flat.cpu(), expected)
        else:
            compare([g.cpu() for g in found], [g for g in gradients(reference) if g is not None])
            # The next one lands in the same place, until the plan changes.
            home += places(model)
            held += [(g, g.view(-1)[1:], g.cpu()) for g in found[step % 2 :: 2]]
        for kept, view, value in held:
            assert torch.equal(kept.cpu(), value)
            assert torch.equal(view.cpu(), value.view(-1)[1:])
        held = held[-12:]
    assert len(set(home)) < len(home) / 2
    assert model.stats().copied_bytes > 0
    held.clear()
    del found, kept, view, flat
    for step in range(3):
        if step == 1:
            model.reset_stats()
        model.zero_grad()
        model(batch(rank, 5, 4, step=step).to("cuda")).backward()
    assert model.stats().copied_bytes == 0


@gpu_ranks.needs_gpu_ranks
@pytest.mark.parametrize("backend", ["nccl", "native"])
def test_held_gradients_on_gpus(backend: str) -> None:
    run_ranks(keep_on_a_gpu, 2, False, env={"PYDIST_BACKEND": backend}, timeout=35)


@gpu_ranks.needs_gpu_ranks
def test_held_gradients_on_gpus_with_a_hook() -> None:
    run_ranks(keep_on_a_gpu, 2, True, env={"PYDIST_BACKEND": "nccl"}, timeout=35)
