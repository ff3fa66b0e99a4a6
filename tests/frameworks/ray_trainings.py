"""Training functions that Ray's workers run, and what a driver gets of them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import ray
import ray.train
import ray.train.torch
import torch
import toy_training as toy
from torch import nn
from torch.utils.data import DataLoader

import pydist
from pydist.integrations import ray as on_pydist


def train(config: dict[str, Any]) -> None:
    """As a user writes it: the same lines for Ray's own functions and for ours.

    Config:
        functions: `ray` for those of `ray.train.torch`, `pydist` for ours.
        folder: Where each worker leaves what it went through.
    """
    of = on_pydist if config["functions"] == "pydist" else ray.train.torch
    model = of.prepare_model(toy.network())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    loader = of.prepare_data_loader(DataLoader(toy.Points(24), batch_size=3))
    losses = []
    for _ in range(2):
        for _, inputs, targets in loader:
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    ray.train.report({"loss": losses[-1]})
    weights = [value.tolist() for value in model.module.state_dict().values()]
    wrapper = f"{type(model).__module__}.{type(model).__name__}"
    _leave(config, {"losses": losses, "weights": weights, "wrapper": wrapper})


def train_and_go_on(config: dict[str, Any]) -> None:
    """As `_go_on`; a worker that loses another one leaves what it was told."""
    try:
        _go_on(config)
    except pydist.PeerLost as error:
        (Path(config["folder"]) / "told").write_text(str(error))
        raise


def _go_on(config: dict[str, Any]) -> None:
    """One epoch, with a checkpoint after every second step, from where the last one stopped.

    Config:
        folder: Where each worker leaves what it went through.
        stop: The number of steps after which to end; None for the whole epoch.
        killed_at: The step before which worker 1 is killed, in the run's first attempt; or None.
        sharded: Whether the optimizer's state is sharded.
    """
    model = on_pydist.prepare_model(toy.network())
    optimizer: Any
    if config["sharded"]:
        optimizer = pydist.ShardedOptimizer(model, torch.optim.AdamW, lr=0.05)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    # 8 samples of 48 a step, on any number of workers; uneven shares are weighted.
    loader = on_pydist.prepare_data_loader(
        DataLoader(toy.Points(48), batch_size=8, shuffle=True), split_batches=True, seed=5
    )
    kept = {"model": model, "optimizer": optimizer, "sampler": loader}
    extra = on_pydist.restore(**kept)
    step = 0 if extra is None else extra["step"]
    began, losses, seen = step, [], []
    mark_of_death = Path(config["folder"]) / "killed"
    for numbers, inputs, targets in loader:
        if (
            step == config["killed_at"]
            and ray.train.get_context().get_world_rank() == 1
            and not mark_of_death.exists()
        ):
            mark_of_death.touch()
            # Ray counts a checkpoint once its controller has heard of it from every worker.
            ray.train.get_all_reported_checkpoints(timeout_s=60)
            os.kill(os.getpid(), signal.SIGKILL)
        with model.weighted(len(numbers)):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        step += 1
        losses.append([loss.item(), len(numbers)])
        seen.append(numbers.tolist())
        if step % 2 == 0:
            on_pydist.report({"step": step}, extra={"step": step}, **kept)
        if step == config["stop"]:
            break
    weights = [value.tolist() for value in model.module.state_dict().values()]
    _leave(config, {"began": began, "losses": losses, "seen": seen, "weights": weights})


def _leave(config: dict[str, Any], left: dict[str, Any]) -> None:
    rank = ray.train.get_context().get_world_rank()
    (Path(config["folder"]) / f"rank-{rank}.json").write_text(json.dumps(left))


def run(
    function: Any,
    torch_config: Any,
    workers: int,
    folder: Path,
    *,
    name: str,
    failures: int = 0,
    **config: Any,
) -> list[dict[str, Any]]:
    """Trains on workers of Ray's; returns what each has left, in rank order.

    Args:
        function: `train` or `train_and_go_on`.
        torch_config: Of the trainer.
        workers: Their number.
        folder: A new one, of this run alone.
        name: Of the run. One that has been is gone on with.
        failures: How often Ray may start the workers anew.
        **config: Of the function.
    """
    folder.mkdir()
    trainer = ray.train.torch.TorchTrainer(
        function,
        train_loop_config={"folder": str(folder), **config},
        torch_config=torch_config,
        scaling_config=ray.train.ScalingConfig(
            num_workers=workers, resources_per_worker={"CPU": 0.5}
        ),
        run_config=ray.train.RunConfig(
            name=name,
            storage_path=str(folder.parent / "storage"),
            failure_config=ray.train.FailureConfig(max_failures=failures),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(workers)]
