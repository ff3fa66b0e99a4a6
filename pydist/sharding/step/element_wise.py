"""Which optimizers treat every element for itself, so that they can update pieces of parameters."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from pydist.errors import InvalidUsage
from pydist.sharding.step.eligibility import changed_key, copy_of, try_in_pieces, without_tensors

# A test checks that each gives the same bits on segments as on whole parameters.
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

# The classes are known by their names, or the beginnings of these, in lower case, from whatever
# package they come. A trial may show nothing: some classes need a closure, draw random numbers, or
# are element-wise with some options only.
_NEEDS_WHOLES = {
    "adafactor": "factors whole matrices and scales by their norms",
    "dash": "preconditions whole matrices",
    "lamb": "scales by the norms of whole parameters",
    "lars": "scales by the norms of whole parameters",
    "lbfgs": "takes inner products over all parameters",
    "muon": "orthogonalises whole matrices",
    "kron": "preconditions whole matrices",
    "novograd": "scales by the norms of whole gradients",
    "psgd": "preconditions whole matrices",
    "shampoo": "preconditions whole matrices",
    "soap": "preconditions whole matrices",
    "sparseadam": "takes sparse gradients",
}
# Matches AdafactorBigVision and FusedLAMB, but not Lambda.
_NAMED_SO = re.compile(rf"(?i:(?:fused_?)?({'|'.join(_NEEDS_WHOLES)}))(?![a-z])")

_REFUSED_OPTIONS = {
    "differentiable": "differentiates through the step, which leaves the ranks' shards apart",
    "capturable": "is for steps within a CUDA graph",
}


def require_element_wise(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    group_options: Sequence[Mapping[str, Any]] = ({},),
) -> None:
    """Raises InvalidUsage where an optimizer can't update pieces of parameters.

    Classes that are not in `ELEMENT_WISE` are tried out on small parameters, so it takes a
    fraction of a second. All ranks come to the same verdict, without a word.

    Args:
        optimizer_class: The class.
        options: That it is given.
        group_options: The own ones of each parameter group.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        given = getattr(optimizer_class, "__name__", type(optimizer_class).__name__)
        raise InvalidUsage(
            f"optimizer_class is {given}; it must be a class of optimizers, such as "
            "torch.optim.AdamW, not an instance"
        )
    if optimizer_class in ELEMENT_WISE:
        return
    for base in optimizer_class.__mro__:
        if named := _NAMED_SO.match(base.__name__):
            raise InvalidUsage(
                f"{base.__name__} {_NEEDS_WHOLES[named[1].lower()]}, so it can't update shards: "
                + _instead_of(base)
            )
    _try_out(optimizer_class, options, group_options)


def _try_out(
    optimizer_class: type[Optimizer],
    options: Mapping[str, Any],
    group_options: Sequence[Mapping[str, Any]],
) -> None:
    verdict = try_in_pieces(optimizer_class, options, group_options)
    name, instead = optimizer_class.__name__, _instead_of(optimizer_class)
    if verdict.error is not None:
        raise InvalidUsage(
            f"{name} can't update shards, which are flat pieces of parameters: a small one, cut, "
            f"made it raise {type(verdict.error).__name__}: {verdict.error}; {instead}"
        ) from verdict.error
    if verdict.undivided_state is not None:
        raise InvalidUsage(
            f"{name} can't update shards: of a small parameter it keeps "
            f"{verdict.undivided_state!r} in its state, which is neither a value for each element "
            "nor one number for all, such as scales of blocks of elements, so shards for another "
            f"number of ranks can't be given their part of it; {instead}"
        )
    if verdict.is_torn:
        raise InvalidUsage(
            f"{name} can't update shards: with these options, a small parameter that is cut into "
            "pieces gets other values than the whole one, so it uses norms, products or shapes "
            f"of whole parameters; {instead}"
        )
    if verdict.changed_option is not None:
        raise _state_in_groups(name, verdict.changed_option)
    if verdict.keeps_common_state:
        raise InvalidUsage(
            f"{name} keeps state in optimizer.state that is of no parameter, which checkpoints of "
            "a pydist.ShardedOptimizer don't hold: use a class that keeps it in "
            f"optimizer.state[parameter], or {name} without pydist.ShardedOptimizer"
        )


def _state_in_groups(name: str, key: str) -> InvalidUsage:
    return InvalidUsage(
        f"{name} keeps state in its parameter groups, where its step() changes {key!r}: ranks "
        "whose shards have nothing of a group can't know that, and checkpoints hold state by "
        "parameters; use a class that keeps it in optimizer.state[parameter], or "
        f"{name} without pydist.ShardedOptimizer"
    )


@contextlib.contextmanager
def groups_unchanged(optimizer: Optimizer) -> Iterator[None]:
    """Around a step: for classes that could not be tried out, on GPUs alone, say.

    Raises:
        InvalidUsage: The step has changed a parameter group, which is state that nobody keeps.
    """
    before = [copy_of(without_tensors(group)) for group in optimizer.param_groups]
    yield
    for old, group in zip(before, optimizer.param_groups, strict=True):
        if (key := changed_key(old, without_tensors(group))) is not None:
            raise _state_in_groups(type(optimizer).__name__, key)


def _instead_of(optimizer_class: type[Optimizer]) -> str:
    names = ", ".join(supported.__name__ for supported in ELEMENT_WISE)
    return f"use one of {names}, or {optimizer_class.__name__} without pydist.ShardedOptimizer"


def require_plain_options(group: Mapping[str, Any]) -> None:
    """Raises InvalidUsage where a group, of a loaded state too, asks for what shards can't give."""
    for name, why in _REFUSED_OPTIONS.items():
        if group.get(name):
            raise InvalidUsage(
                f"{name}=True {why}: pydist.ShardedOptimizer is made without it, and loads states "
                f"whose groups have {name}=False"
            )
