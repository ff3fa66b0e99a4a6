"""Trains a small network in a pipeline of two stages, each on several processes.

    pydist run -n 4 examples/pipeline.py     # 2 stages, 2 replicas of each
    pydist run -n 2 examples/pipeline.py     # 2 stages, 1 replica
    python examples/pipeline.py              # one process, the whole network

All print the same losses: a batch is shared out among the replicas, cut into micro-batches, and the
replicas of a stage average their gradients once a step.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import pydist
from pydist.pipelining import PipelineStage

STAGES, MICRO_BATCHES = 2, 4
BATCH, WIDTH, STEPS = 64, 32, 30


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*layers).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    target = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    inputs = torch.randn(STEPS, BATCH, WIDTH, dtype=torch.float64)
    with torch.no_grad():
        return [(x, target(x)) for x in inputs]


def train_alone() -> list[float]:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_in_stages() -> list[float]:
    replicas, rest = divmod(pydist.world_size(), STAGES)
    if rest:
        raise SystemExit(f"the number of processes must be a multiple of {STAGES}")
    stage_index, replica = pydist.rank() % STAGES, pydist.rank() // STAGES
    # All ranks make all groups: the stages of each replica, and the replicas of each stage.
    chains = [dist.new_group([r * STAGES + s for s in range(STAGES)]) for r in range(replicas)]
    peers = [dist.new_group([r * STAGES + s for r in range(replicas)]) for s in range(STAGES)]

    layers = network()
    part = layers[stage_index * 2 : stage_index * 2 + 2]
    model = pydist.DataParallel(part, process_group=peers[stage_index])
    stage = PipelineStage(model, stage_index, STAGES, torch.device("cpu"), group=chains[replica])
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches():
        own_x, own_y = x.chunk(replicas)[replica], y.chunk(replicas)[replica]
        optimizer.zero_grad()
        of_micro_batches: list[Tensor] = []
        if stage.is_last:
            schedule.step(target=own_y, losses=of_micro_batches)
        else:
            schedule.step(own_x)
        optimizer.step()
        if stage.is_last:
            loss = torch.stack(of_micro_batches).mean().detach()
            losses.append(pydist.all_reduce(loss, "mean", group=peers[stage_index]).item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="file for the losses, as JSON")
    arguments = parser.parse_args()
    pydist.init()
    losses = train_alone() if pydist.world_size() == 1 else train_in_stages()
    if losses and pydist.rank() == min(STAGES, pydist.world_size()) - 1:  # the first that has them
        for step in (0, STEPS // 2, STEPS - 1):
            print(f"step {step:2d}  loss {losses[step]:.10f}")
        if arguments.output is not None:
            arguments.output.write_text(json.dumps({"losses": losses}))


if __name__ == "__main__":
    main()
