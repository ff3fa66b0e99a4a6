"""Whatever a training loop does to gradients, in random order, beside the same in arithmetic."""

import contextlib
import copy
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
import torch
from thorough import everyday
from torch import Tensor, nn
from training import Runner, batch
from twins import TIME_LIMIT, Pausing, Twins

import pydist

pytestmark = TIME_LIMIT

PROGRAMS = 8
LAYERS = 8

Gradients = dict[str, Tensor]


def program(choices: random.Random, may_scale: bool) -> Iterator[str]:
    is_pending = False
    for _ in range(choices.randint(3, 9)):
        # What has accumulated is neither changed nor replaced, which raises; that it was set to
        # None in between, nobody can tell.
        acts = ["backward", "backward", "accumulate", "zero", "synchronize"]
        if not is_pending:
            acts += ["put", "scale"] if may_scale else ["put"]
        act = choices.choice(acts)
        yield act
        if act == "put":
            act = choices.choice(["backward", "accumulate"])
            yield act
        if act not in ("scale", "zero"):
            is_pending = act == "accumulate"


@dataclass
class Own:
    """What one rank has that was not averaged: each gradient times its weight."""

    gradients: Gradients = field(default_factory=dict)
    by_hand: set[str] = field(default_factory=set)
    total_weight: float = 0.0

    def put(self, name: str, gradient: Tensor) -> None:
        self.gradients[name] = gradient
        self.by_hand.add(name)

    def add(self, gradients: Gradients, weight: float) -> None:
        for name in self.by_hand:  # counts with the backward that comes next
            self.gradients[name] = weight * self.gradients[name]
        self.by_hand.clear()
        for name, gradient in gradients.items():
            before = self.gradients.get(name, torch.zeros_like(gradient))
            self.gradients[name] = before + weight * gradient
        self.total_weight += weight


class Expected:
    """What the gradients of all ranks come to."""

    def __init__(self, size: int, *, is_mean: bool, is_weighted: bool) -> None:
        self.is_mean, self.is_weighted = is_mean, is_weighted
        self.averaged: Gradients = {}
        self.ranks = [Own() for _ in range(size)]

    def reduce(self) -> None:
        count = len(self.ranks)
        total = sum(own.total_weight for own in self.ranks) if self.is_weighted else count
        names = {name for own in self.ranks for name in own.gradients}
        for name in names:
            found = [own.gradients[name] for own in self.ranks if name in own.gradients]
            new = torch.stack(found).sum(0) / (total if self.is_mean else 1)
            self.averaged[name] = self.averaged.get(name, torch.zeros_like(new)) + new
        self.ranks = [Own() for _ in self.ranks]

    def forget(self) -> None:
        self.averaged.clear()
        self.ranks = [Own() for _ in self.ranks]

    def scale(self, factor: float) -> None:
        self.averaged = {name: factor * each for name, each in self.averaged.items()}


class Programs:
    """Runs one program on twins, and in arithmetic."""

    def __init__(self, stage: int, seed: int) -> None:
        self.seed = seed
        self.common = random.Random(seed)
        self.is_weighted = self.common.random() < 0.5
        self.reduction = self.common.choice(["mean", "sum"])
        self.module = Pausing()
        self.twins = Twins(
            self.module,
            torch.optim.SGD,
            cap_mb=self.common.choice([0.0005, 0.002]),
            options={"lr": 0.1},
            wrapping={"reduction": self.reduction},
            stage=stage,
        )
        self.expected = Expected(
            self.twins.size, is_mean=self.reduction == "mean", is_weighted=self.is_weighted
        )
        self.each_rank = [random.Random(1000 * seed + rank) for rank in range(self.twins.size)]
        self.done: list[str] = []

    def run(self) -> None:
        # Whether what was averaged and then changed is still a sum, or counts with whose weight,
        # nobody can tell: sync_gradients() raises.
        may_scale = self.reduction == "mean" and not self.is_weighted
        for act in program(self.common, may_scale):
            self.done.append(act)
            getattr(self, act)()

    def backward(self) -> None:
        self._go_backward(accumulates=False)
        self.expected.reduce()
        self.check()

    def accumulate(self) -> None:
        self._go_backward(accumulates=True)

    def synchronize(self) -> None:
        for model in self.twins.models:
            model.sync_gradients()
        self.expected.reduce()
        self.check()

    def zero(self) -> None:
        set_to_none = self.common.random() < 0.5
        self.twins.each(lambda _, optimizer: optimizer.zero_grad(set_to_none=set_to_none))
        self.expected.forget()

    def scale(self) -> None:
        for model in self.twins.models:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
        self.expected.scale(0.5)

    def put(self) -> None:
        for number, (name, parameter) in enumerate(self.module.named_parameters()):
            if self.common.random() < 0.7:
                continue
            self.expected.averaged.pop(name, None)
            for rank, own in enumerate(self.expected.ranks):
                gradient = batch(rank, *parameter.shape, step=self._step() + 1 + number)
                own.put(name, gradient)
                if rank == self.twins.rank:
                    for model in self.twins.models:
                        model.module.get_parameter(name).grad = gradient.clone()

    def _step(self) -> int:
        return 10_000 * self.seed + 100 * len(self.done)

    def _go_backward(self, accumulates: bool) -> None:
        pause_s = self.common.choice([0.0, 0.0, 0.01])
        for rank, (own, choices) in enumerate(
            zip(self.expected.ranks, self.each_rank, strict=True)
        ):
            skipped = tuple(choices.sample(range(LAYERS), choices.choice([0, 0, 2, 4])))
            weight = float(choices.randint(1, 4)) if self.is_weighted else 1.0
            x = batch(rank, 3, 10, step=self._step())
            own.add(gradients_of(self.module, x, skipped), weight)
            if rank != self.twins.rank:
                continue
            for model in self.twins.models:
                with (
                    model.weighted(weight) if self.is_weighted else contextlib.nullcontext(),
                    model.no_sync(enabled=accumulates),
                ):
                    model(x, pause_s, skipped).backward()

    def check(self) -> None:
        sharded, plain = self.twins.models
        for name, parameter in sharded.module.named_parameters():
            expected = self.expected.averaged.get(name, torch.zeros_like(parameter))
            for what, found in (
                ("sharded", self.twins.ours.gradient_of(parameter)),
                ("whole", plain.module.get_parameter(name).grad),
            ):
                found = torch.zeros_like(parameter) if found is None else found
                torch.testing.assert_close(
                    found,
                    expected,
                    rtol=1e-9,
                    atol=1e-12,
                    msg=lambda text, what=what, name=name: (
                        f"{what} gradient of {name} after {self.done}, seed {self.seed}, "
                        f"{self.reduction}, weights: {self.is_weighted}: {text}"
                    ),
                )


def gradients_of(module: nn.Module, x: Tensor, skipped: tuple[int, ...]) -> Gradients:
    alone = copy.deepcopy(module)
    alone(x, 0.0, skipped).backward()
    return {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}


def run_programs(stage: int, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + PROGRAMS):
        Programs(stage, seed).run()
        pydist.barrier()


@pytest.mark.parametrize("stage", everyday(2, thorough=(1,)))
def test_programs(run_sharded: Runner, stage: int) -> None:
    run_sharded(run_programs, stage, 100 * stage)
