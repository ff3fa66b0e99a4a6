"""A wrapper that knows its optimizer: one call for a backward, one for a step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pydist._torch import runs_uncompiled, runs_uncompiled_throughout
from pydist.errors import InvalidUsage
from pydist.parallel.wrapper import DataParallel
from pydist.sharding.clipping import clip_gradients

# What users of DeepSpeed's engine look for, and what there is here.
_OF_DEEPSPEEDS_ENGINE = {
    "save_checkpoint": "pydist.save(path, model=model, optimizer=optimizer)",
    "load_checkpoint": "pydist.load(path, model=model, optimizer=optimizer)",
    "local_rank": "pydist.local_rank()",
    "global_rank": "pydist.rank()",
    "world_size": "pydist.world_size()",
    "gradient_accumulation_steps": "model.accumulation_steps",
    "gradient_clipping": "model.clip_grad_norm",
    "get_lr": "[group['lr'] for group in optimizer.param_groups]",
}


class Engine(DataParallel):
    """What `pydist.initialize` makes of a model: a `pydist.DataParallel` that also steps.

    Gradients of `accumulation_steps` backwards are averaged, over them and over the ranks.
    `backward` and `step` are called once for each batch, as with DeepSpeed; a step that is not due
    yet does nothing. Batches are counted over the ends of epochs: the last ones of an epoch, where
    they are fewer than a step takes, are the first ones of the next step.

    The gradients of a step travel once, with its last backward. Forwards may run ahead of the
    backwards before them; a step's gradients may then travel more than once.

    Attributes:
        optimizer: Updates the parameters. A copy of the model has none, and can't step; a pickle is
            of the module alone.
        lr_scheduler: Steps with it; None if there is none.
        accumulation_steps: How many backwards make a step.
        clip_grad_norm: What the norm of the gradients that the optimizer has is cut to; None: they
            stay. Of 16-bit gradients, norm and factor are taken in float32.
        global_steps: How many steps were made. A checkpoint has it as its step where it is saved
            with `step=model.global_steps`; `model.global_steps = pydist.load(...).step` goes on.

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

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name not in _OF_DEEPSPEEDS_ENGINE:
                raise
        raise AttributeError(
            f"the model of pydist.initialize has no {name}, which DeepSpeed's has: use "
            f"{_OF_DEEPSPEEDS_ENGINE[name]}"
        )

    @runs_uncompiled_throughout
    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next call of `step` updates the parameters."""
        coming = self._backwards + (not self._is_step_expected)
        return coming >= self.accumulation_steps

    @runs_uncompiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the module's forward; only the last backward of a step averages over the ranks."""
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with self.no_sync(enabled=not self.is_gradient_accumulation_boundary()):
            return super().forward(*args, **kwargs)

    @runs_uncompiled_throughout
    def backward(self, loss: Tensor) -> Tensor:
        """Adds a loss's part of the step's gradient. All ranks call it.

        Args:
            loss: A scalar, the mean over this rank's samples. Inside `weighted()` it counts for the
                weight, in the mean over all backwards of the step.

        Returns:
            The part of the step's loss that it is: the loss divided by `accumulation_steps`.

        Raises:
            InvalidUsage: The backward before this one was not followed by `step()`.
        """
        if self._is_step_expected:
            raise InvalidUsage("backward() was called twice: call step() after each backward()")
        part = loss / self.accumulation_steps
        # Weights take a mean over the backwards of a step, too, which needs no other one.
        summed = part if self.weight_of_backward is None else loss
        is_last = self.is_gradient_accumulation_boundary()
        round_before = self._round()
        summed.backward()
        if is_last and self._round() == round_before:
            # Nothing was averaged: the loss's forward ran ahead of the backwards before it, when it
            # was not known to be the last one. Rounds are the same on all ranks, so all sync.
            self.sync_gradients()
        self._backwards += 1
        self._is_step_expected = True
        return part.detach()

    def _round(self) -> int:
        """How many times the ranks have averaged gradients of this model."""
        return 0 if self._working_reducer is None else self._working_reducer.round

    @runs_uncompiled_throughout
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
            clip_gradients(parameters, self.clip_grad_norm)
        optimizer.step()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()
        optimizer.zero_grad()
        self.zero_grad()  # of parameters that the optimizer does not have
        self.global_steps += 1
