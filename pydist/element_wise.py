"""Which optimizers treat every element for itself, so that they can update pieces of parameters."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from pydist.errors import InvalidUsage

# Each is held to the bits of the same class on whole parameters, by a test.
ELEMENT_WISE: tuple[type[Optimizer], ...] = (
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.Adam,
    torch.optim.Adamax,
    torch.optim.AdamW,
    torch.optim.ASGD,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.SGD,
)

# By the names that they have wherever they are from, in lower case.
_NEEDS_WHOLES = {
    "adafactor": "factors whole matrices and scales by their norms",
    "lamb": "scales by the norms of whole parameters",
    "lars": "scales by the norms of whole parameters",
    "lbfgs": "takes inner products over all parameters",
    "muon": "orthogonalises whole matrices",
    "novograd": "scales by the norms of whole gradients",
    "shampoo": "preconditions whole matrices",
    "soap": "preconditions whole matrices",
    "sparseadam": "takes sparse gradients",
}

_REFUSED_OPTIONS = {
    "differentiable": "differentiates through the step, which leaves the ranks' shards apart",
    "capturable": "is for steps within a CUDA graph",
}


def require_element_wise(optimizer_class: type[Optimizer]) -> None:
    """Raises InvalidUsage where an optimizer can't update pieces of parameters.

    Classes of others are taken to be element-wise unless their name is known: nothing else tells
    from outside. Subclasses are what they derive from.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        given = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        raise InvalidUsage(
            f"optimizer_class is {given}; it must be a class of optimizers, such as "
            "torch.optim.AdamW, not an instance"
        )
    for base in optimizer_class.__mro__:
        name = base.__name__.lower().removeprefix("fused").removesuffix("8bit")
        if name in _NEEDS_WHOLES:
            names = ", ".join(supported.__name__ for supported in ELEMENT_WISE)
            raise InvalidUsage(
                f"{base.__name__} {_NEEDS_WHOLES[name]}, so it can't update shards: use "
                f"one of {names}, or {base.__name__} without pydist.ShardedOptimizer"
            )


def require_plain_options(group: dict[str, object]) -> None:
    """Raises InvalidUsage where a parameter group asks for what shards can't give."""
    for name, why in _REFUSED_OPTIONS.items():
        if group.get(name):
            raise InvalidUsage(f"{name}=True {why}: leave it out with pydist.ShardedOptimizer")
