"""The averaged gradients of a sharded optimizer: this rank's parts, and what all make together."""

from __future__ import annotations

import torch
from torch import Tensor

from pydist import _native
from pydist.data_parallel import DataParallel
from pydist.errors import InvalidUsage
from pydist.module_agreement import check_same
from pydist.sharded_gradient import ShardedGradient, part_norm, whole_norms
from pydist.sharded_layout import ShardedLayout


class ReducedGradients:
    """Gradients by the numbers of their parameters.

    Args:
        layout: The parameters.
        communicator: The ranks.
        wrapper: The model whose reducer averages the gradients, if any does.
    """

    def __init__(
        self,
        layout: ShardedLayout,
        communicator: _native.Communicator,
        wrapper: DataParallel | None,
    ) -> None:
        self._layout = layout
        self._communicator = communicator
        self._wrapper = wrapper
        self._changes = 0
        self._norms: tuple[object, dict[int, Tensor]] = (None, {})

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The whole averaged gradient of a parameter. All ranks call it, for the same one."""
        index = self._layout.indices.get(id(parameter))
        if index is None:
            raise InvalidUsage("gradient_of() was given a tensor that the optimizer does not have")
        gradient = parameter.grad
        if self._wrapper is not None:
            kind = (
                "none"
                if gradient is None
                else "one that is averaged"
                if isinstance(gradient, ShardedGradient)
                else "one of its own"
            )
            check_same(
                self._communicator,
                f"the gradient of parameter {self._layout.names[index]}",
                [kind],
                "ask for it after a backward that averages it, or after sync_gradients()",
            )
        if gradient is None or not isinstance(gradient, ShardedGradient):
            return None if gradient is None else gradient.detach().clone()
        self._layout.notice_buckets()
        flat = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        if index in self._layout.gradients:
            begin, part = self._layout.gradients[index]
            flat[begin : begin + part.numel()] = part
        self._communicator.all_reduce(flat, flat, "sum", False)
        return flat.as_strided(parameter.shape, self._layout.members[index].strides)

    def all_norms(self, order: float) -> dict[int, Tensor]:
        """Of all gradients that are sharded, in one operation for those on a device."""
        assert self._wrapper is not None
        key = (order, self._changes, self._wrapper._reducer.round)
        if self._norms[0] != key:
            indices = [
                index
                for index, parameter in enumerate(self._layout.parameters)
                if isinstance(parameter.grad, ShardedGradient)
            ]
            found: dict[int, Tensor] = {}
            # In an order that all ranks have.
            for device in dict.fromkeys(self._layout.parameters[i].device for i in indices):
                here = [i for i in indices if self._layout.parameters[i].device == device]
                parts = torch.stack([part_norm(self.part_of(i), order) for i in here])
                norms = whole_norms(parts, order, self.combine)
                found |= dict(zip(here, norms.unbind(), strict=True))
            self._norms = (key, found)
        return self._norms[1]

    def part_of(self, index: int) -> Tensor:
        """This rank's part of a gradient: of one dimension, perhaps empty."""
        self._layout.notice_buckets()
        if index not in self._layout.gradients:
            parameter = self._layout.parameters[index]
            return torch.zeros(0, dtype=parameter.dtype, device=parameter.device)
        return self._layout.gradients[index][1]

    def combine(self, tensor: Tensor, op: str) -> None:
        """Combines a tensor with the other ranks', in place. All ranks call it."""
        if op == "sum":
            self._communicator.all_reduce(tensor, tensor, op, False)
            return
        # Not every backend has a maximum of numbers that may be NaN on every device; torch has.
        rows = tensor.new_empty([self._communicator.size, *tensor.shape])
        self._communicator.all_gather(tensor, rows, False)
        (torch.amax if op == "max" else torch.amin)(rows, 0, out=tensor)

    def note_change(self) -> None:
        """All ranks have changed their parts."""
        self._changes += 1
