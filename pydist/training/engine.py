"""A wrapper that knows its optimizer: one call for a backward, one for a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from pydist.errors import InvalidUsage
from pydist.parallel.wrapper import DataParallel


class Engine(DataParallel):
    """What `pydist.initialize` makes of a model: a `pydist.DataParallel` that also steps.

    Gradients of `accumulation_steps` backwards are averaged, over them and over the ranks, and
    travel once. `backward` and `step` are called once for each forward, as with DeepSpeed; a step
    that is not due yet does nothing.

    Attributes:
        optimizer: Updates the parameters. A copy of the model has none, and can't step; a pickle is
            of the module alone.
        lr_scheduler: Steps with it; None if there is none.
        accumulation_steps: How many backwards make a step.
        clip_grad_norm: What the norm of the gradients that the optimizer has is cut to; None: they
            stay.
        global_steps: How many steps were made.

    Example:
        >>> model, optimizer, _, _ = pydist.initialize(
        ...     torch.nn.Linear(2, 1), lambda parameters: torch.optim.SGD(parameters, lr=1.0),
        ...     config={"training": {"accumulation_steps": 2}})
        >>> for samples in torch.ones(4, 3, 2):
        ...     model.backward(model(samples).mean())
        ...     model.step()
        >>> model.global_steps
        2
    """

    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: Any = None
    accumulation_steps: int = 1
    clip_grad_norm: float | None = None
    global_steps: int = 0
    # Backwards since the last step that was made, and whether one of them still waits for step().
    _backwards: int = 0
    _is_step_expected: bool = False

    _own_names = DataParallel._own_names | {
        *("optimizer", "lr_scheduler", "accumulation_steps", "clip_grad_norm", "global_steps"),
        *("_backwards", "_is_step_expected"),
    }

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next call of `step` updates the parameters."""
        coming = self._backwards + (not self._is_step_expected)
        return coming >= self.accumulation_steps

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; only the last backward of a step averages over the ranks."""
        if not torch.is_grad_enabled() or self.is_gradient_accumulation_boundary():
            return super().forward(*args, **kwargs)
        with self.no_sync():
            return super().forward(*args, **kwargs)

    def backward(self, loss: Tensor) -> Tensor:
        """Adds a loss's part of the step's gradient. All ranks call it.

        Args:
            loss: A scalar, the mean over this rank's samples.

        Returns:
            The part of the step's loss that it is: the loss divided by `accumulation_steps`.

        Raises:
            InvalidUsage: The backward before this one was not followed by `step()`.
        """
        if self._is_step_expected:
            raise InvalidUsage("backward() was called twice: call step() after each backward()")
        part = loss / self.accumulation_steps
        part.backward()
        self._backwards += 1
        self._is_step_expected = True
        return part.detach()

    def step(self) -> None:
        """Where enough gradients are there: clips, updates, schedules, and sets them to zero.

        All ranks call it, after each `backward`.

        Raises:
            InvalidUsage: There was no `backward` since the last call.
        """
        optimizer = self.optimizer
        if optimizer is None:
            raise InvalidUsage("a copy of the model has no optimizer: step the one it was made of")
        if not self._is_step_expected:
            raise InvalidUsage("step() has nothing to do: call backward(loss) before")
        is_due = self.is_gradient_accumulation_boundary()
        self._is_step_expected = False
        if not is_due:
            return
        self._backwards = 0
        if self.clip_grad_norm is not None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            nn.utils.clip_grad_norm_(parameters, self.clip_grad_norm)
        optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        optimizer.zero_grad()
        self.zero_grad()  # of parameters that the optimizer does not have
        self.global_steps += 1
