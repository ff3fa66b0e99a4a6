"""A program as users write it: says its losses, which rank has trained, and who has started it."""

import sys
from typing import Any

import lightning_runs as runs
import torch
from lightning.pytorch.demos.boring_classes import BoringModel


class Tells(BoringModel):  # type: ignore[misc]
    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        print(f"loss {self.global_rank} {outputs['loss']:.6f}\n", end="", flush=True)

    def on_train_end(self) -> None:
        strategy = self.trainer.strategy
        wrapper = type(strategy.model).__name__
        by = type(strategy.cluster_environment).__name__
        told = f"rank {self.global_rank} of {self.trainer.world_size} in {wrapper} by {by}"
        # With its line's end in one write: the ranks share the output.
        print(f"{told}\n", end="", flush=True)


def main(strategy: str, devices: str) -> None:
    torch.manual_seed(0)
    settings: dict[str, Any] = {"max_steps": 3}
    if devices == "auto":
        settings["accelerator"] = runs.two_processors()
    count: Any = devices if devices == "auto" else int(devices)
    trainer = runs.trainer_of("lightning", strategy, count, **settings)
    trainer.fit(Tells())


if __name__ == "__main__":
    main(*sys.argv[1:])
