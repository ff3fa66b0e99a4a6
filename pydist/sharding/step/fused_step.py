"""The step of some segments by pydist's kernels.

The kernels step as torch's Adam, AdamW and SGD, which is what `fused=True` asks for. One pass over
memory reads the reduced gradient in its own dtype, updates the values (float32 copies of parameters
in 16 bits, otherwise the parameters) and the states, and writes the parameters. The states are
those that torch's class would have, so that it may go on with them, and they may come from it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist import _native
from pydist.sharding.buckets import Segment

# This rank's part of each segment's gradient; None where it has none.
Gradients = Sequence[Tensor | None]

# Whose steps the kernels know.
FUSED_CLASSES: tuple[type[Optimizer], ...] = (
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.SGD,
)


def fused_step(
    optimizer: Optimizer,
    group: dict[str, Any],
    segments: Sequence[Segment],
    threads: _native.StepThreads | None = None,
) -> FusedStep | None:
    """The step of the segments of a group.

    Args:
        optimizer: Of the wrapped class.
        group: One of its groups.
        segments: What is in it; at least one.
        threads: As for `BucketStep`.

    Returns:
        None where no kernel takes the class or the segments.
    """
    dtypes = _gradient_dtypes(segments)
    if type(optimizer) not in FUSED_CLASSES or not dtypes:
        return None
    kind = _SgdStep if type(optimizer) is torch.optim.SGD else _AdamStep
    return kind(optimizer, group, segments, dtypes, threads)


class FusedStep:
    """The step of segments that have their options in common.

    Args:
        optimizer: Whose state the segments have.
        group: Their options.
        segments: In the order of the gradients that `run` is given.
        gradient_dtypes: In which the kernel takes them.
        threads: As for `BucketStep`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        group: dict[str, Any],
        segments: Sequence[Segment],
        gradient_dtypes: frozenset[torch.dtype],
        threads: _native.StepThreads | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._group = group
        self._segments = segments
        self._gradient_dtypes = gradient_dtypes
        self._threads = threads
        # What a call takes, which stays the same while the same segments step; and which those are.
        self._targets: list[Tensor] = []
        self._masters: list[Tensor] | None = None
        self._states: list[list[Tensor]] = []
        self._key: object = None
        # Whether the last call may have changed nothing.
        self._is_undecided = False

    def run(
        self, gradients: Gradients, scale: float = 1.0, found_inf: Tensor | None = None
    ) -> bool:
        """Updates the segments that have a gradient, which is multiplied by `scale` first.

        Where `found_inf`, a number on the GPU, is not 0, that changes nothing but the numbers of
        steps: call `uncount` once the host knows.

        Returns:
            Whether it did. Otherwise nothing has changed, and it is for torch's class: the group
            does not ask for it, or has options, or the gradients a dtype, that no kernel takes.
        """
        self._is_undecided = False
        is_wanted = self._threads is not None or self._group.get("fused")
        if not is_wanted or has_other_kernels(self._group):
            return False
        options = self._options()
        if options is None:
            return False
        chosen: list[int] = []
        taken: list[Tensor] = []
        for number, (segment, gradient) in enumerate(zip(self._segments, gradients, strict=True)):
            if gradient is None:
                continue
            if gradient is not segment.gradient:  # of something else than pydist's reducer
                if gradient.dtype not in self._gradient_dtypes:
                    return False
                gradient = gradient.resolve_neg().contiguous()
            chosen.append(number)
            taken.append(gradient)
        if chosen:
            names = self._state_names()
            if self._key != (chosen, names):
                self._gather(chosen, names)
                self._key = (chosen, names)
            beside: dict[str, Any] = {"gradient_scale": scale, "threads": self._threads}
            if found_inf is not None:
                beside["found_inf"] = found_inf
                self._is_undecided = True
            self._call(taken, {**options, **beside})
        return True

    def uncount(self) -> None:
        """The last call has changed nothing: takes back what the host counts, if it counted."""
        if self._is_undecided:
            self._is_undecided = False
            self._uncount()

    def forget(self) -> None:
        """Somebody puts other tensors into the optimizer's state: keeps none of the old ones."""
        self._targets, self._masters, self._states = [], None, []
        self._key = None
        self._is_undecided = False

    def _gather(self, chosen: Sequence[int], names: Sequence[str]) -> None:
        """Lists what a call takes for some segments."""
        segments = [self._segments[number] for number in chosen]
        self._targets = [segment.values for segment in segments]
        self._masters = (
            [segment.updated for segment in segments] if segments[0].has_master else None
        )
        states = [self._state_of(segment.updated) for segment in segments]
        self._states = [[state[name] for state in states] for name in names]

    def _options(self) -> dict[str, Any] | None:
        """Arguments of the kernel; None where it does not take the group's options."""
        raise NotImplementedError

    def _state_names(self) -> tuple[str, ...]:
        """What it updates beside the values."""
        raise NotImplementedError

    def _state_of(self, updated: Tensor) -> dict[str, Any]:
        """A segment's state, made as torch's class makes it."""
        raise NotImplementedError

    def _call(self, gradients: list[Tensor], options: dict[str, Any]) -> None:
        raise NotImplementedError

    def _uncount(self) -> None:
        raise NotImplementedError


class _AdamStep(FusedStep):
    _steps: list[Tensor]

    def _options(self) -> dict[str, Any] | None:
        group = self._group
        beta1, beta2 = (_number(beta) for beta in group["betas"])
        options = {
            "lr": _number(group["lr"]),
            "beta1": beta1,
            "beta2": beta2,
            "eps": _number(group["eps"]),
            "weight_decay": _number(group["weight_decay"]),
        }
        if not (_are_plain(options.values()) and beta1 < 1 and beta2 < 1):
            return None
        return {
            **options,
            "decoupled": bool(group["decoupled_weight_decay"]),
            "maximize": bool(group["maximize"]),
        }

    def _state_names(self) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if self._group["amsgrad"] else names

    def _state_of(self, updated: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[updated]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device="cpu")
            for name in self._state_names():
                state[name] = torch.zeros_like(updated)
        return state

    def _gather(self, chosen: Sequence[int], names: Sequence[str]) -> None:
        super()._gather(chosen, names)
        self._steps = []
        for number in chosen:
            state = self._optimizer.state[self._segments[number].updated]
            state["step"] = _step_on_the_host(state["step"])
            self._steps.append(state["step"])

    def _call(self, gradients: list[Tensor], options: dict[str, Any]) -> None:
        _native.adam_step(
            self._targets, gradients, self._masters, *self._states, step=self._steps, **options
        )

    def _uncount(self) -> None:
        for step in self._steps:
            step -= 1


class _SgdStep(FusedStep):
    # Of the chosen segments; which of their momentum buffers hold nothing yet; and those whose
    # buffers the last call has filled.
    _updated: list[Tensor]
    _begins: list[bool]
    _begun: list[Tensor]

    def _options(self) -> dict[str, Any] | None:
        group = self._group
        names = ("lr", "momentum", "dampening", "weight_decay")
        options = {name: _number(group[name]) for name in names}
        nesterov = bool(group["nesterov"])
        if not _are_plain({**options, "dampening": abs(options["dampening"])}.values()):
            return None
        if nesterov and (options["momentum"] == 0 or options["dampening"] != 0):
            return None
        return {**options, "nesterov": nesterov, "maximize": bool(group["maximize"])}

    def _state_names(self) -> tuple[str, ...]:
        return () if self._group["momentum"] == 0 else ("momentum_buffer",)

    def _state_of(self, updated: Tensor) -> dict[str, Any]:
        if self._group["momentum"] == 0:
            return {}  # torch's class leaves what there is
        state: dict[str, Any] = self._optimizer.state[updated]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.empty_like(updated)
        return state

    def _gather(self, chosen: Sequence[int], names: Sequence[str]) -> None:
        known = self._optimizer.state
        segments = [self._segments[number] for number in chosen]
        self._begins = [
            known.get(segment.updated, {}).get("momentum_buffer") is None for segment in segments
        ]
        super()._gather(chosen, names)
        self._updated = [segment.updated for segment in segments]

    def _call(self, gradients: list[Tensor], options: dict[str, Any]) -> None:
        buffers = self._states[0] if self._states else None
        _native.sgd_step(
            self._targets, gradients, self._masters, buffers, begins=self._begins, **options
        )
        filled = zip(self._updated, self._begins, strict=True)
        self._begun = [updated for updated, begins in filled if begins and buffers is not None]
        self._begins = [False] * len(gradients)

    def _uncount(self) -> None:
        for updated in self._begun:
            del self._optimizer.state[updated]["momentum_buffer"]
        if self._begun:
            self.forget()


def has_other_kernels(group: dict[str, Any]) -> bool:
    """Whether a group has an option that torch's own kernels support and ours do not."""
    return any(group.get(name) for name in ("capturable", "differentiable", "foreach"))


def asks_for_kernels(group: dict[str, Any]) -> bool:
    """Whether a group is stepped by kernels, where its parameters and gradients are for them."""
    return bool(group.get("fused")) and not has_other_kernels(group)


def _gradient_dtypes(segments: Sequence[Segment]) -> frozenset[torch.dtype]:
    """In which the kernels take gradients for such segments; none where they don't take those."""
    kinds = {(segment.updated.device.type, segment.updated.dtype) for segment in segments}
    if len(kinds) != 1:  # complex ones lie beside real ones
        return frozenset()
    ((device, computed),) = kinds
    devices = {segment.updated.device.index for segment in segments}
    if device == "cuda" and not all(map(_has_cuda_kernels, devices)):
        return frozenset()
    if computed == torch.float32 and device in ("cpu", "cuda"):
        return frozenset((torch.float32, torch.bfloat16, torch.float16))
    if computed == torch.float64 and device == "cpu":
        return frozenset((torch.float64,))
    return frozenset()


@functools.cache
def _has_cuda_kernels(device: int) -> bool:
    return not _native.cuda_kernels_obstacle(device)


def _number(value: float | Tensor) -> float:
    is_one = not isinstance(value, Tensor) or value.numel() == 1
    return float(value) if is_one else math.nan


def _are_plain(values: Iterable[float]) -> bool:
    return all(0 <= value < math.inf for value in values)


def _step_on_the_host(step: Any) -> Tensor:
    """Where torch's class leaves the number of a step, unless it is fused."""
    kinds = (torch.float32, torch.float64)
    if isinstance(step, Tensor) and step.device.type == "cpu" and step.dtype in kinds:
        return step
    return torch.tensor(float(step), dtype=torch.float32, device="cpu")
