"""Lightning's Trainer and Fabric on pydist.

`import pydist.integrations.lightning` registers the strategies "pydist", "pydist_spawn" and
"pydist_notebook", which start processes as "ddp", "ddp_spawn" and "ddp_notebook" do, and
"pydist_sharded" and "pydist_sharded_stage_2", whose optimizers are `pydist.ShardedOptimizer`s::

    import pydist.integrations.lightning
    trainer = lightning.Trainer(strategy="pydist", devices=2)

`lightning` and `pytorch_lightning` are two packages with classes of their own, so each that is
installed gets strategies of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from pydist.integrations.lightning.sharded import ShardedFabricMethods, ShardedTrainerMethods
from pydist.integrations.lightning.strategies import FabricMethods, TrainerMethods

__all__ = ["register"]

# The names of strategies, and what they give their class.
_REPLICATED: dict[str, dict[str, Any]] = {
    "pydist": {"start_method": "popen"},
    "pydist_spawn": {"start_method": "spawn"},
    "pydist_notebook": {"start_method": "fork"},
}
_SHARDED: dict[str, dict[str, Any]] = {
    "pydist_sharded": {"stage": 1},
    "pydist_sharded_stage_2": {"stage": 2},
}


def _make(name: str, base: type, methods: type, **attributes: Any) -> type:
    """A strategy's class, at the root of this module: spawned processes get it by its name."""
    made = type(name, (methods, base), {"__module__": __name__, **attributes})
    globals()[name] = made
    return made


def _add(registry: Any, made: type, arguments: dict[str, dict[str, Any]]) -> None:
    for name, given in arguments.items():
        said = ", ".join(f"`{key}` {value!r}" for key, value in given.items())
        registry.register(
            name, made, description=f"{made.__name__} with {said}", override=True, **given
        )


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
        wrapper = importlib.import_module(f"{trainer}.core.optimizer").LightningOptimizer
        of_fabric = importlib.import_module(f"{fabric}.strategies")
        prefix = "Lightning" if package == "lightning" else "PytorchLightning"
        trainers, fabrics = strategies.StrategyRegistry, of_fabric.STRATEGY_REGISTRY
        for kind, of_trainer, own_of_fabric, arguments in (
            ("", TrainerMethods, FabricMethods, _REPLICATED),
            ("Sharded", ShardedTrainerMethods, ShardedFabricMethods, _SHARDED),
        ):
            made = _make(
                f"{prefix}{kind}Strategy",
                strategies.DDPStrategy,
                of_trainer,
                _redirection_class=redirection,
                _optimizer_class=wrapper,
            )
            _add(trainers, made, arguments)
            made = _make(f"{prefix}{kind}FabricStrategy", of_fabric.DDPStrategy, own_of_fabric)
            _add(fabrics, made, arguments)
    if not found:
        raise ImportError(
            "pydist.integrations.lightning needs Lightning: pip install 'pydist[lightning]'"
        )
    return found


register()
