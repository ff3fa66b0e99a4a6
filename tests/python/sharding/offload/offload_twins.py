"""Offloaded training beside steps of the host's kernels on the same gradients.

The gradients are those that the model has when it steps: averaged, clipped, unscaled. The twin has
whole parameters and steps them whole. Kernels round alike however parameters are cut, so all is
compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_twins import start
from torch import Tensor, nn
from training import batch

import pydist
from pydist import _native
from pydist.sharding.buckets import SHORT, Member, Segment
from pydist.sharding.step.fused_step import FusedStep, fused_step


class Uneven(nn.Module):
    """Sizes that nothing divides, one that is empty, and layers that nobody uses or trains."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inside = nn.Linear(10, 33, dtype=dtype)
        self.middle = nn.ModuleList(nn.Linear(33, 33, dtype=dtype) for _ in range(3))
        self.scalar = nn.Parameter(torch.tensor(0.5, dtype=dtype))
        self.empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype))
        self.transposed = nn.Parameter(torch.randn(7, 33).div(5).to(dtype).t())
        self.single = nn.Parameter(torch.randn(301, dtype=torch.float64))
        self.never = nn.Linear(5, 3, dtype=dtype)
        self.frozen = nn.Parameter(torch.randn(7, dtype=dtype), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inside(x.to(self.frozen.device, self.frozen.dtype)).tanh()
        for layer in self.middle:
            y = layer(y).tanh() + y
        y = y @ self.transposed * self.scalar + self.frozen
        single = (self.single * 0.7).cos().mean() * 1e-2
        return y.float().square().mean() + single + self.empty.sum()


def flat(values: Tensor) -> Tensor:
    """A copy on the host, of one dimension."""
    return values.detach().cpu().contiguous().view(-1).clone()


class KernelTwin:
    """Whole parameters on the host, stepped by the kernels.

    Args:
        optimizer: Whose groups and parameters it follows.
        values: Of each parameter, at the beginning.
    """

    def __init__(self, optimizer: pydist.ShardedOptimizer, values: dict[Tensor, Tensor]) -> None:
        self._theirs = optimizer
        self.values = {p: flat(v) for p, v in values.items()}
        self.updated = {p: v.float() if v.dtype in SHORT else v for p, v in self.values.items()}
        groups = [
            {**group, "params": [self.updated[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        for group in groups:
            group.pop("param_names", None)
        self.optimizer = optimizer.optimizer_class(groups)  # type: ignore[call-arg]
        threads = _native.StepThreads(1)
        self._steps: list[list[tuple[Tensor, FusedStep]]] = []
        for group, own in zip(optimizer.param_groups, self.optimizer.param_groups, strict=True):
            steps = []
            for p in group["params"]:
                member = Member(0, "", p, 0, ())
                segment = Segment(member, 0, self.values[p], self.updated[p], None)
                made = fused_step(self.optimizer, own, [segment], threads)
                assert made is not None
                steps.append((p, made))
            self._steps.append(steps)

    def step(self, gradients: dict[Tensor, Tensor | None], options: list[dict[str, Any]]) -> None:
        for own, given, steps in zip(
            self.optimizer.param_groups, options, self._steps, strict=True
        ):
            own.update({k: v for k, v in given.items() if k not in ("params", "param_names")})
            for p, fused in steps:
                gradient = gradients[p]
                if gradient is not None:
                    assert fused.run([flat(gradient)])


class Offloaded:
    """A model on the GPU, with an optimizer whose state is on the host, and the twin."""

    def __init__(
        self,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        dtype: torch.dtype = torch.float32,
        stage: Any = 1,
        delayed: bool = False,
        groups: bool = False,
        cap_mb: float = 0.004,
        delay_us: int = 50,
        **options: Any,
    ) -> None:
        self.rank, self.size = start(delay_us)
        torch.manual_seed(1)
        module = Uneven(dtype).to("cuda")
        self.model = pydist.DataParallel(module, bucket_cap_mb=cap_mb)
        options = {"lr": 0.01, **options}
        given: Any = self.model
        if groups:
            named = list(self.model.named_parameters())
            given = [
                {"params": [p for n, p in named if n.startswith("inside")], "lr": 0.1},
                {"params": [p for n, p in named if not n.startswith("inside")]},
            ]
        self.optimizer = pydist.ShardedOptimizer(
            given, optimizer_class, stage=stage, offload="cpu", delayed=delayed, **options
        )
        self.parameters = [p for g in self.optimizer.param_groups for p in g["params"]]
        self.twin = KernelTwin(self.optimizer, {p: p for p in self.parameters})
        self._is_delayed = delayed
        # With a delayed step, what it steps by, which reaches parameters with the next.
        self._late: list[tuple[dict[Tensor, Tensor | None], list[dict[str, Any]]]] = []

    def backward(self, step: int) -> Tensor:
        loss = self.loss(step)
        loss.backward()
        return loss

    def train(self, step: int) -> None:
        """Backward and step, from no gradients."""
        self.optimizer.zero_grad()
        self.backward(step)
        self.step()

    def loss(self, step: int) -> Tensor:
        loss: Tensor = self.model(batch(self.rank, 6, 10, step=step))
        return loss

    def gradients(self) -> dict[Tensor, Tensor | None]:
        return {p: self.optimizer.gradient_of(p) for p in self.parameters}

    def options(self) -> list[dict[str, Any]]:
        return [
            {k: v for k, v in group.items() if k != "params"}
            for group in self.optimizer.param_groups
        ]

    def step(self, step: Callable[[], object] | None = None) -> None:
        """Of both; the gradients are looked at before."""
        self._late.append((self.gradients(), self.options()))
        (step or self.optimizer.step)()
        while len(self._late) > self._is_delayed:
            self.twin.step(*self._late.pop(0))

    def finish(self) -> None:
        """No step is late any more."""
        self.optimizer.finish()
        while self._late:
            self.twin.step(*self._late.pop(0))

    def write(self, factor: float) -> None:
        """The program writes parameters, past autograd's count of writes."""
        for _, p in self.named():
            p.data.mul_(factor)
            self.twin.values[p].copy_(flat(p))

    def check(self, what: str) -> None:
        for (name, ours), values in zip(
            ((n, p) for n, p in self.named()), self.twin.values.values(), strict=True
        ):
            assert ours.device.type == "cuda"
            assert torch.equal(flat(ours), values), f"{what}: {name}"

    def named(self) -> Iterator[tuple[str, Tensor]]:
        names = {p: n for n, p in self.model.named_parameters()}
        for p in self.twin.values:
            yield names[p], p
