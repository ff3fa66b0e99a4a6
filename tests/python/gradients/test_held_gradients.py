"""Gradients that the program keeps: they hold their values, as in torch's DDP."""

import contextlib
import copy
from typing import Any

import gpu_ranks
import pytest
import torch
from beside_torch import (
    STEPS,
    WAYS,
    Found,
    Moody,
    beside_torch,
    compare,
    gradients,
    inner,
    into_flat,
    order_of,
    places,
    values_of,
)
from launch import run_ranks
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from training import LIMIT_S, TIME_LIMIT, Branches, Runner, batch, joined
from twins import ManyKinds

import pydist

pytestmark = TIME_LIMIT


# --- what is held keeps its values ---------------------------------------------------------------


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
