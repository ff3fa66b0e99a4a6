"""Which of torch's functions ask a tensor for facts about itself, such as its shape.

A tensor whose values are not there (of which this rank has a part, or that is on its way) answers
them at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from pydist._torch import VERSION


def getters(names: Iterable[str]) -> set[Any]:
    """The functions as which torch announces the reading of a tensor's attributes."""
    return {getattr(Tensor, name).__get__ for name in names}


_ATTRIBUTES = (
    "device",
    "dtype",
    "grad",
    "grad_fn",
    "is_cpu",
    "is_cuda",
    "is_leaf",
    "is_sparse",
    "itemsize",
    "layout",
    "nbytes",
    "ndim",
    "requires_grad",
    "shape",
)

FACTS: set[Any] = {
    VERSION,
    *getters(_ATTRIBUTES),
    Tensor.dim,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_complex,
    Tensor.is_floating_point,
    Tensor.nelement,
    Tensor.numel,
    Tensor.requires_grad_,
    Tensor.size,
    Tensor.__hash__,
    Tensor.__len__,
}
