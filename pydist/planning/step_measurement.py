"""Times a model's training step on one process, for what can't be known from shapes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist._torch import tree_leaves, tree_map_only
from pydist.errors import InvalidUsage
from pydist.planning.step_time import Compute

_WARM_STEPS = 3
_LEAST_STEPS = 5
_MOST_STEPS = 50
_SECONDS = 2.0


@dataclass(frozen=True)
class MeasuredStep:
    """What a process takes alone.

    Attributes:
        compute: Medians.
        ready_shares: For each parameter that got a gradient, the share of backward after which it
            was there: a median, too.
        steps: How many were timed.
        device: Where.
    """

    compute: Compute
    ready_shares: dict[str, float]
    steps: int
    device: str


def measure_step(
    model: nn.Module, sample: Any, optimizer: type[Optimizer], options: Mapping[str, Any]
) -> MeasuredStep:
    """Trains a model for some seconds: forward, backward of the mean square, optimizer.

    Args:
        model: On its device, with values. It is trained, so it is not what it was afterwards.
        sample: Arguments of forward: a tensor, a tuple, or a dictionary of keywords. They are moved
            to the model's device.
        optimizer: The class.
        options: Of the class.

    Raises:
        InvalidUsage: The model lies on "meta", trains nothing, or can't make a step.
    """
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    device = next((p.device for p in trained.values()), None)
    if device is None or device.type == "meta":
        raise InvalidUsage(
            "a step can't be timed: the model "
            + ("trains no parameter" if device is None else 'lies on torch\'s device "meta"')
        )
    arguments = sample if isinstance(sample, dict | tuple) else (sample,)
    arguments = tree_map_only(Tensor, lambda tensor: tensor.to(device), arguments)
    gpu = device if device.type == "cuda" else None
    times: list[tuple[float, float, float]] = []
    ready: dict[str, list[float]] = {name: [] for name in trained}
    arrived: dict[str, float] = {}
    hooks = [
        parameter.register_post_accumulate_grad_hook(
            lambda _, name=name: arrived.__setitem__(name, _now(gpu))
        )
        for name, parameter in trained.items()
    ]
    try:
        update = optimizer(trained.values(), **options)
        begin_s = time.perf_counter()
        while len(times) < _WARM_STEPS + _LEAST_STEPS or (
            len(times) < _WARM_STEPS + _MOST_STEPS and time.perf_counter() - begin_s < _SECONDS
        ):
            update.zero_grad()
            arrived.clear()
            started_s = _now(gpu)
            out = model(**arguments) if isinstance(arguments, dict) else model(*arguments)
            loss = _loss(out)
            forward_s = _now(gpu)
            loss.backward()
            backward_s = _now(gpu)
            update.step()
            times.append((forward_s - started_s, backward_s - forward_s, _now(gpu) - backward_s))
            for name, at_s in arrived.items():
                ready[name].append((at_s - forward_s) / (backward_s - forward_s))
    except Exception as error:
        raise InvalidUsage(
            f"a step can't be timed: it raised {type(error).__name__}: {error}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    kept = times[_WARM_STEPS:]
    forward, backward, step = (statistics.median(column) for column in zip(*kept, strict=True))
    shares = {name: statistics.median(seen[_WARM_STEPS:]) for name, seen in ready.items() if seen}
    return MeasuredStep(Compute(forward, backward, step), shares, len(kept), _device_name(device))


def _now(gpu: torch.device | None) -> float:
    if gpu is not None:
        torch.cuda.synchronize(gpu)
    return time.perf_counter()


def _loss(output: Any) -> Tensor:
    floats = [
        leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad
    ]
    if not floats:
        raise InvalidUsage("the model's output has no tensor with a gradient")
    return torch.stack([leaf.abs().float().square().mean() for leaf in floats]).sum()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.get_num_threads()} threads of this machine's processor"
