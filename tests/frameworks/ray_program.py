"""A driver of Ray: starts a cluster of its own, trains as asked, and writes what came out.

Its arguments are one of the functions below, and an empty folder.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import ray
from ray.train.torch import TorchConfig
from ray_trainings import run, train, train_and_go_on

from pydist.integrations.ray import PydistConfig


def parity(folder: Path) -> Any:
    """Ray's own training on gloo, and ours."""
    configs = {"ray": TorchConfig(backend="gloo"), "pydist": PydistConfig()}
    results = {
        name: run(train, config, 2, folder / name, name=name, functions=name)
        for name, config in configs.items()
    }
    # A function of this script travels by value, so the worker has not imported pydist for it.
    results["backend"] = run(backend, PydistConfig(), 1, folder / "backend", name="backend")
    return results


def backend(config: dict[str, Any]) -> None:
    """Leaves the backend of the group that Ray has made; imports no pydist."""
    import torch.distributed as dist

    Path(config["folder"], "rank-0.json").write_text(json.dumps(dist.get_backend()))


def loss_of_a_worker(folder: Path) -> Any:
    """A training that loses a worker, and one that does not."""
    return {
        name: run(
            train_and_go_on,
            PydistConfig(timeout_s=60),
            2,
            folder / name,
            name=name,
            failures=1,
            killed_at=killed_at,
            stop=None,
            sharded=True,
        )
        for name, killed_at in (("whole", None), ("lost", 3))
    }


def other_numbers(folder: Path) -> Any:
    """An epoch of one worker, and ones that two begin and another number goes on with."""
    kept: dict[str, Any] = {"killed_at": None, "sharded": False}
    results = {}
    for name, workers in (("whole", 1), ("three", 3), ("one", 1)):
        if name != "whole":
            started = run(
                train_and_go_on,
                PydistConfig(timeout_s=60),
                2,
                folder / f"{name}-started",
                name=name,
                stop=4,
                **kept,
            )
            results[f"{name} started"] = started
        results[name] = run(
            train_and_go_on,
            PydistConfig(timeout_s=60),
            workers,
            folder / name,
            name=name,
            stop=None,
            **kept,
        )
    return results


def lightning(folder: Path) -> Any:
    """Lightning's Trainer by Ray's own strategy on gloo, and by ours."""
    from ray_lightning_trainings import train as train_by_lightning

    configs = {"ray": TorchConfig(backend="gloo"), "pydist": PydistConfig()}
    return {
        name: run(train_by_lightning, config, 2, folder / name, name=name, functions=name)
        for name, config in configs.items()
    }


def main(scenario: str, folder: Path) -> None:
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=os.environ["RAY_TEST_FOLDER"],
        object_store_memory=100 * 2**20,
    )
    try:
        results = globals()[scenario](folder)
    finally:
        ray.shutdown()
    (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
