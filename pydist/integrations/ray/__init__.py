"""Ray Train on pydist: `PydistConfig` for its trainer, and what training functions call.

In place of what `ray.train.torch` has of the same names::

    from pydist.integrations.ray import PydistConfig, prepare_data_loader, prepare_model

    trainer = ray.train.torch.TorchTrainer(
        train,  # calls prepare_model and prepare_data_loader
        torch_config=PydistConfig(),
        scaling_config=ray.train.ScalingConfig(num_workers=2),
    )

`report` and `restore` keep checkpoints of pydist where Ray keeps its own, so that a training which
has lost a worker goes on from the last one, on any number of workers.
`pydist.integrations.ray.lightning` has a strategy for Lightning's Trainer inside of Ray Train.
"""

from pydist.integrations.ray.checkpoints import report, restore
from pydist.integrations.ray.config import PydistConfig
from pydist.integrations.ray.preparation import prepare_data_loader, prepare_model

__all__ = ["PydistConfig", "prepare_data_loader", "prepare_model", "report", "restore"]
