"""Lightning's Trainer on pydist, in the workers of Ray Train."""

from __future__ import annotations

from typing import Any

from ray.train.lightning import RayDDPStrategy

from pydist.integrations import lightning

# Of the package that Ray's own strategy is of: `lightning` where both are installed.
_Strategy: Any = getattr(lightning, "LightningStrategy", None) or getattr(
    lightning, "PytorchLightningStrategy", None
)


class RayPydistStrategy(_Strategy, RayDDPStrategy):
    """The strategy "pydist" where Ray has started the processes, whose group it takes.

    For a training function that runs with `torch_config=PydistConfig()`::

        Trainer(strategy=RayPydistStrategy(), plugins=[RayLightningEnvironment()], devices="auto")

    Takes the arguments of `pydist.DataParallel`. The time-out is `PydistConfig`'s.
    """
