"""Gradients that the program has put into `parameter.grad` itself: as in torch's DDP."""

import contextlib
import random
from typing import Any

import pytest
import torch
from beside_torch import (
    STEPS,
    WAYS,
    Found,
    Moody,
    beside_torch,
    gradients,
    inner,
    into_flat,
    order_of,
    values_of,
)
from thorough import everyday
from torch import Tensor
from training import TIME_LIMIT, Runner, batch

pytestmark = TIME_LIMIT


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


@pytest.mark.parametrize("first_seed", everyday(0, thorough=(4,)))
def test_random_programs(run_on_some: Runner, first_seed: int) -> None:
    run_on_some(act_at_random, first_seed)
