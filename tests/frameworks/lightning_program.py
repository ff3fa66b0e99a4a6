"""A program as users write it, which starts its own processes: says which rank has trained."""

import sys
from typing import Any

import lightning_runs as runs
from lightning.pytorch.demos.boring_classes import BoringModel


class Tells(BoringModel):  # type: ignore[misc]
    def on_train_end(self) -> None:
        wrapper = type(self.trainer.strategy.model).__name__
        # With its line's end in one write: the ranks share the output.
        sys.stdout.write(f"rank {self.global_rank} of {self.trainer.world_size} in {wrapper}\n")
        sys.stdout.flush()


def main(strategy: str) -> None:
    trainer: Any = runs.trainer_of("lightning", strategy, 2, max_steps=3)
    trainer.fit(Tells())


if __name__ == "__main__":
    main(sys.argv[1])
