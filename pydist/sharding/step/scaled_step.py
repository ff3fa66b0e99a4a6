"""Steps that `torch.amp.GradScaler` lets the GPU leave out, where a gradient is not finite.

By torch's protocol of `_step_supports_amp_scaling`, the scaler gives the optimizer two attributes,
`grad_scale` and `found_inf`, and calls `step()` whatever the gradients are. So the host never waits
to know. It counts each step as taken, and takes that back once it hears, in the next step or when
somebody looks at the state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.gpu.late_number import LateNumber, send_number
from pydist.sharding.sharded_gradient import scale_each
from pydist.sharding.step.bucket_step import BucketStep


class ScaledStep:
    """What a scaler has given an optimizer for one step.

    Args:
        optimizer: The optimizer.
        parameters: Its parameters; where a scaler has given it something, on one GPU.

    Attributes:
        found_inf: A number beside the parameters that is not 0 where the step is to be left out;
            None without a scaler.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        # Of no gradients at all, torch's scaler makes the number 0 and no tensor.
        found: Tensor | float | None = getattr(optimizer, "found_inf", None)
        self.found_inf: Tensor | None = None
        if found is not None and parameters:
            self.found_inf = torch.as_tensor(found, dtype=torch.float32)
            self.found_inf = self.found_inf.detach().to(parameters[0].device, non_blocking=True)
        self._grad_scale: Tensor | float | None = getattr(optimizer, "grad_scale", None)

    def unscale(self) -> None:
        """Divides the gradients, which are in float32, and stay divided."""
        if self._grad_scale is None:
            return
        # By the inverse in float32, as the scaler's unscale_().
        scale = torch.as_tensor(self._grad_scale)
        inverse = scale.detach().double().reciprocal().float()
        scale_each([p.grad for p in self._parameters if p.grad is not None], inverse)


def forget_scale(optimizer: Optimizer) -> None:
    """A step has raised, and the scaler leaves its attributes, which are not of the next step."""
    for name in ("found_inf", "grad_scale"):
        optimizer.__dict__.pop(name, None)


class LeftOutStep:
    """Whether the last step was left out, which the host hears late."""

    def __init__(self) -> None:
        self._found_inf: LateNumber | None = None
        self._steps: list[BucketStep] = []

    def expect(self, found_inf: Tensor | None, steps: Sequence[BucketStep]) -> None:
        """A step was begun that leaves itself out where the number is not 0."""
        if found_inf is not None and found_inf.device.type == "cuda":
            self._found_inf, self._steps = send_number(found_inf), list(steps)

    def settle(self) -> None:
        """Returns once the last step is counted if it was taken."""
        if self._found_inf is None:
            return
        was_left_out = self._found_inf.read() != 0
        steps, self._found_inf, self._steps = self._steps, None, []
        if was_left_out:
            for step in steps:
                step.uncount()
