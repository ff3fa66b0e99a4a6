"""A training of Lightning's Trainer that Ray's workers run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import lightning_runs
import ray.train
import ray.train.lightning
from lightning.pytorch import Callback


class Says(Callback):  # type: ignore[misc]
    """Takes down what wraps the model, which is unwrapped once the training has ended."""

    wrapper = ""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        kind = type(trainer.strategy.model)
        self.wrapper = f"{kind.__module__}.{kind.__name__}"


def train(config: dict[str, Any]) -> None:
    """Two epochs, as a user of Ray writes them.

    Config:
        functions: `ray` for Ray's strategy, `pydist` for ours.
        folder: Where each worker leaves what it went through.
    """
    warnings.simplefilter("ignore")
    if config["functions"] == "ray":
        strategy: Any = ray.train.lightning.RayDDPStrategy()
    else:
        from pydist.integrations.ray.lightning import RayPydistStrategy

        strategy = RayPydistStrategy()
    says = Says()
    trainer = ray.train.lightning.prepare_trainer(
        lightning_runs.tree_of("lightning").Trainer(
            accelerator="cpu",
            devices="auto",
            strategy=strategy,
            plugins=[ray.train.lightning.RayLightningEnvironment()],
            callbacks=[says, ray.train.lightning.RayTrainReportCallback()],
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    )
    model = lightning_runs.regression("lightning", length=24, batch_size=3)
    trainer.fit(model)
    left = {
        "losses": model.losses,
        "seen": model.seen,
        "logged": float(trainer.callback_metrics["loss"]),
        "weights": lightning_runs.plain(list(model.state_dict().values())),
        "wrapper": says.wrapper,
    }
    rank = ray.train.get_context().get_world_rank()
    (Path(config["folder"]) / f"rank-{rank}.json").write_text(json.dumps(left))
