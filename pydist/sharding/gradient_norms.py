"""The averaged gradients of a sharded optimizer: this rank's parts, and what all make together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.parallel.checks.replica_check import check_same
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.clipping import require_finite, wide_norm
from pydist.sharding.placement import ShardedLayout
from pydist.sharding.sharded_gradient import ShardedGradient, part_norm, scale_each, whole_norms


@dataclass(eq=False)
class ReducedGradients:
    """Gradients by the numbers of their parameters.

    Args:
        layout: The parameters.
        communicator: The ranks.
        wrapper: The model whose reducer averages the gradients, if any does.
        scaling: What is around a multiplication of gradients in place, by a number: of those with
            these numbers.
    """

    layout: ShardedLayout
    communicator: _native.Communicator
    wrapper: DataParallel | None
    scaling: Callable[[Tensor, set[int]], AbstractContextManager[None]] | None = None
    _changes: int = field(default=0, init=False)
    _norms: tuple[object, dict[int, Tensor]] = field(default=(None, {}), init=False)

    def gradient_of(self, parameter: Tensor) -> Tensor | None:
        """The whole averaged gradient of a parameter. All ranks call it, for the same one.

        That of a parameter which this rank has alone, it asks for alone.
        """
        index = self.layout.indices.get(id(parameter))
        if index is None:
            raise InvalidUsage("gradient_of() was given a tensor that the optimizer does not have")
        gradient = parameter.grad
        if self.wrapper is not None and index not in self.layout.own:
            kind = (
                "none"
                if gradient is None
                else "one that is averaged"
                if isinstance(gradient, ShardedGradient)
                else "one of its own"
            )
            check_same(
                self.communicator,
                f"the gradient of parameter {self.layout.names[index]}",
                [kind],
                "ask for it after a backward that averages it, or after sync_gradients()",
            )
        if gradient is None or not isinstance(gradient, ShardedGradient):
            return None if gradient is None else gradient.detach().clone()
        self.layout.notice_buckets()
        flat = torch.zeros(parameter.numel(), dtype=parameter.dtype, device=parameter.device)
        if index in self.layout.gradients:
            begin, part = self.layout.gradients[index]
            flat[begin : begin + part.numel()] = part
        self.communicator.all_reduce(flat, flat, "sum", False)
        return flat.as_strided(parameter.shape, self.layout.members[index].strides)

    def refuse_pending(self) -> None:
        """Raises InvalidUsage in a step where gradients were accumulated and never averaged."""
        if self.wrapper is None:
            return
        owned = self.layout.indices
        if any(id(parameter) in owned for parameter in self.wrapper._reducer.pending):
            raise InvalidUsage(
                "ShardedOptimizer.step() would use gradients that were accumulated under no_sync() "
                "(or past the wrapper, by model.module(...)) and never averaged. Each rank updates "
                "a part of every parameter, so ranks can't train apart: mend the program, so that "
                "the last forward before step() is model(...) outside of no_sync(), or "
                "sync_gradients() comes before step()"
            )

    def name_of(self, index: int) -> str:
        """The name of a parameter."""
        return self.layout.names[index]

    def norms(self, order: float) -> dict[int, Tensor]:
        """The norms of all sharded gradients, by one operation for each device."""
        assert self.wrapper is not None
        key = (order, self._changes, self.wrapper._reducer.round)
        if self._norms[0] != key:
            indices = [
                index
                for index, parameter in enumerate(self.layout.parameters)
                if isinstance(parameter.grad, ShardedGradient)
            ]
            found: dict[int, Tensor] = {}
            # In an order that is the same on all ranks.
            for device in dict.fromkeys(self.layout.parameters[i].device for i in indices):
                here = [i for i in indices if self.layout.parameters[i].device == device]
                parts = torch.stack([part_norm(self.part(i), order) for i in here])
                norms = whole_norms(parts, order, self.combine)
                found |= dict(zip(here, norms.unbind(), strict=True))
            self._norms = (key, found)
        return self._norms[1]

    def part(self, index: int) -> Tensor:
        """This rank's part of a gradient: of one dimension, perhaps empty."""
        self.layout.notice_buckets()
        if index not in self.layout.gradients:
            parameter = self.layout.parameters[index]
            return torch.zeros(0, dtype=parameter.dtype, device=parameter.device)
        return self.layout.gradients[index][1]

    def combine(self, tensor: Tensor, op: str) -> None:
        """Combines a tensor with the other ranks', in place. All ranks call it."""
        if op == "sum":
            self.communicator.all_reduce(tensor, tensor, op, False)
            return
        # Not every backend has a maximum of numbers that may be NaN on every device; torch has.
        rows = tensor.new_empty([self.communicator.size, *tensor.shape])
        self.communicator.all_gather(tensor, rows, False)
        (torch.amax if op == "max" else torch.amin)(rows, 0, out=tensor)

    def note_change(self) -> None:
        """All ranks have changed their parts."""
        self._changes += 1

    def own_gradients(self) -> list[Tensor]:
        """The gradients of the parameters that this rank has alone."""
        parameters = [self.layout.parameters[index] for index in sorted(self.layout.own)]
        return [p.grad for p in parameters if p.grad is not None]

    def require_same(self, factors: Sequence[Any]) -> None:
        """Raises Mismatch where ranks change their parts of a gradient by different numbers.

        Costs nothing unless ranks have parameters of their own. Where they do, a norm that a
        program takes over all parameters differs between them, and so does what follows from it.
        """
        if not self.layout.some_have_own or self.communicator.size == 1:
            return
        numbers = [f.item() if isinstance(f, Tensor) else f for f in factors]
        check_same(
            self.communicator,
            "what the ranks' parts of a gradient are changed by",
            [repr(number) for number in numbers],
            "ranks have parameters of their own (torch calls them ignored), so a norm over all "
            "parameters is another one on each: clip by optimizer.clip_grad_norm_(), whose norm is "
            "of all ranks' gradients together",
        )

    def note_own_finite(self, found_inf: Tensor) -> None:
        """Sets `found_inf` where a gradient of this rank's own is not finite.

        So a step is left out on all ranks, whoever found it: GradScaler asks each rank alone.
        """
        for gradient in self.own_gradients():
            is_bad = (~gradient.isfinite()).any().to(found_inf.device, found_inf.dtype)
            found_inf.copy_(torch.maximum(found_inf, is_bad))

    def clip_with_own(self, max_norm: float, order: float, error_if_nonfinite: bool) -> Tensor:
        """Scales gradients by their norm over all ranks, with those that ranks have alone.

        What all ranks share counts once. All ranks call it.
        """
        averaged = [p for i, p in enumerate(self.layout.parameters) if i not in self.layout.own]
        shared = [p.grad for p in averaged if p.grad is not None]
        own = self.own_gradients()
        # The empty part yields the number that changes no norm of this order.
        parts = [part_norm(g.detach().reshape(-1), order).cpu() for g in [torch.empty(0), *own]]
        join = torch.amax if order == math.inf else torch.amin if order == -math.inf else torch.sum
        of_own = whole_norms(join(torch.stack(parts), 0).view(1), order, self.combine)
        norms = [wide_norm(gradient, order).double().cpu() for gradient in shared]
        total: Tensor = torch.linalg.vector_norm(torch.stack([*norms, of_own[0]]), order)
        if error_if_nonfinite:
            require_finite(total, order)
        scale_each([*shared, *own], torch.clamp(max_norm / (total + 1e-6), max=1.0))
        dtype = torch.promote_types(self.layout.parameters[0].dtype.to_real(), torch.float32)
        return total.to(self.layout.parameters[0].device, dtype)
