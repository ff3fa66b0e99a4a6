"""Pipelines of two ranks, each stage with several replicas, and the same model on one process."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.pipelining.schedules import ScheduleDualPipeV

import pydist
from pydist.pipelining import PipelineStage

SCHEDULES = {
    "GPipe": torch_pipelining.ScheduleGPipe,
    "1F1B": torch_pipelining.Schedule1F1B,
    "Interleaved1F1B": torch_pipelining.ScheduleInterleaved1F1B,
    "InterleavedZeroBubble": torch_pipelining.ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": torch_pipelining.ScheduleZBVZeroBubble,
    "DualPipeV": ScheduleDualPipeV,
}
MICRO_BATCHES, STEPS, SAMPLES, WIDTH = 4, 3, 32, 6


def whole_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    return nn.Sequential(*layers).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, SAMPLES, WIDTH, dtype=torch.float64, generator=generator).to(dtype)
    return x, y


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def by_one_process(
    dtype: torch.dtype = torch.float64, steps: Sequence[int] = range(STEPS)
) -> nn.Sequential:
    model = whole_model(dtype)
    optimizer = sgd(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        x, y = batch(step, dtype)
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


class Place:
    """This rank's: its stages (each of one of the four layers, or of two) and its replica."""

    def __init__(self, replicas: int, kind: str) -> None:
        pydist.init()
        position, self.replica = pydist.rank() % 2, pydist.rank() // 2
        chains = [dist.new_group([2 * r, 2 * r + 1]) for r in range(replicas)]
        of_stage = [dist.new_group([s + 2 * r for r in range(replicas)]) for s in range(2)]
        self.position = position
        self.chain, self.peers = chains[self.replica], of_stage[position]
        if kind in ("GPipe", "1F1B"):
            self.layers, self.stages, self.of_all = (
                [[2 * position, 2 * position + 1]],
                [position],
                2,
            )
        else:
            self.stages = [
                position,
                3 - position if kind in ("ZBVZeroBubble", "DualPipeV") else position + 2,
            ]
            self.layers, self.of_all = [[stage] for stage in self.stages], 4
        samples = SAMPLES // replicas
        self.share = slice(self.replica * samples, (self.replica + 1) * samples)

    def parts(self, model: nn.Sequential) -> list[nn.Sequential]:
        """The layers of each stage, under their names in the whole model."""
        return [
            nn.Sequential(OrderedDict((str(layer), model[layer]) for layer in layers))
            for layers in self.layers
        ]

    def stage_of(self, module: nn.Module, stage: int, stage_class: Any = PipelineStage) -> Any:
        return stage_class(module, stage, self.of_all, torch.device("cpu"), group=self.chain)

    def make(self, model: nn.Sequential, stage_class: Any = PipelineStage) -> list[Any]:
        return [
            self.stage_of(pydist.DataParallel(part, process_group=self.peers), stage, stage_class)
            for part, stage in zip(self.parts(model), self.stages, strict=True)
        ]

    def schedule(
        self, kind: str, stages: list[Any], loss: Any, micro_batches: int = MICRO_BATCHES
    ) -> Any:
        stage = stages[0] if kind in ("GPipe", "1F1B") else stages
        return SCHEDULES[kind](stage, micro_batches, loss_fn=loss)

    def step(self, schedule: Any, x: Tensor, y: Tensor) -> None:
        args = (x[self.share],) if 0 in self.stages else ()
        targets = {"target": y[self.share]} if self.of_all - 1 in self.stages else {}
        schedule.step(*args, **targets)


def require_weights(found: Any, expected: nn.Sequential, **tolerance: float) -> None:
    for layers, weights in found:
        wanted = [p for layer in layers for p in expected[layer].parameters()]
        for weight, other in zip(weights, wanted, strict=True):
            torch.testing.assert_close(weight, other.detach(), **tolerance)


def require_same(layers: Sequence[int], module: nn.Module, expected: nn.Sequential) -> None:
    """The weights of a stage, of the given layers, are one process's, to 12 digits."""
    weights = [p.detach() for p in module.parameters()]
    require_weights([(layers, weights)], expected, rtol=1e-12, atol=1e-14)
