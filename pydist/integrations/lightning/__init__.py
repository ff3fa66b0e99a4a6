"""Lightning's Trainer and Fabric on pydist.

`import pydist.integrations.lightning` registers the strategies "pydist", "pydist_spawn" and
"pydist_notebook", which start processes as "ddp", "ddp_spawn" and "ddp_notebook" do::

    import pydist.integrations.lightning
    trainer = lightning.Trainer(strategy="pydist", devices=2)

`lightning` and `pytorch_lightning` are two packages with classes of their own, so each that is
installed gets strategies of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from pydist.integrations.lightning.strategies import FabricMethods, TrainerMethods

__all__ = ["register"]

# The names of strategies, and how each starts its processes.
_START_METHODS = {"pydist": "popen", "pydist_spawn": "spawn", "pydist_notebook": "fork"}


def _make(name: str, base: type, methods: type, **attributes: Any) -> type:
    """A strategy's class, at the root of this module: spawned processes get it by its name."""
    made = type(name, (methods, base), {"__module__": __name__, **attributes})
    globals()[name] = made
    return made


def register() -> list[str]:
    """Registers the strategies with each Lightning that is installed; importing this module does.

    Returns:
        The names of the packages that have them now.

    Raises:
        ImportError: Neither `lightning` nor `pytorch_lightning` is installed.
    """
    found = []
    for package, trainer, fabric in (
        ("lightning", "lightning.pytorch", "lightning.fabric"),
        ("pytorch_lightning", "pytorch_lightning", "lightning_fabric"),
    ):
        if importlib.util.find_spec(package) is None:
            continue
        found.append(package)
        strategies = importlib.import_module(f"{trainer}.strategies")
        redirection = importlib.import_module(f"{trainer}.strategies.strategy")._ForwardRedirection
        of_fabric = importlib.import_module(f"{fabric}.strategies")
        prefix = "Lightning" if package == "lightning" else "PytorchLightning"
        for_trainer = _make(
            f"{prefix}Strategy",
            strategies.DDPStrategy,
            TrainerMethods,
            _redirection_class=redirection,
        )
        for_fabric = _make(f"{prefix}FabricStrategy", of_fabric.DDPStrategy, FabricMethods)
        for registry, made in (
            (strategies.StrategyRegistry, for_trainer),
            (of_fabric.STRATEGY_REGISTRY, for_fabric),
        ):
            for name, method in _START_METHODS.items():
                registry.register(
                    name,
                    made,
                    description=f"pydist.DataParallel, with `start_method` '{method}'",
                    override=True,
                    start_method=method,
                )
    if not found:
        raise ImportError(
            "pydist.integrations.lightning needs Lightning: pip install 'pydist[lightning]'"
        )
    return found


register()
