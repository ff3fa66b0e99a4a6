"""Watches that the gradients of a wrapped model are finite (`check_finite=`).

Note [A gradient that is not finite]
What a rank raises in a backward that averages, the others learn in that backward. A backward that
only accumulates meets nobody: were it to raise, this rank would leave its step, and the others
would average that step's gradients with its next one's. So what is found there is logged, and
raised by what averages it, a backward or `sync_gradients()`, or by a step that comes before it;
unless the gradient has been thrown away by then.

Note [Gradients on a GPU]
To read a gradient there would stop the host until it is computed. So the GPU itself looks at what a
backward averages: at this rank's gradients, and at those that were accumulated before. What it has
seen is sent to the host behind that backward, and raised in the next one that averages, from which
the others learn it. By then a step has been taken with it. A backward that raised is not told of:
its gradients were never used.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pydist.errors import InvalidUsage
from pydist.gpu.late_number import LateNumber, send_number
from pydist.job.log import logger

if TYPE_CHECKING:
    from pydist._native import Reducer


class FiniteCheck:
    """What one wrapper watches, if that is asked for.

    Args:
        looks: Whether it is.
    """

    def __init__(self, looks: bool) -> None:
        self._looks = looks
        # By id: to compare tensors is to compare their elements.
        self._watched: dict[int, weakref.ref[Tensor]] = {}
        self._names: dict[int, str] = {}
        # Forwards that average, with the present one: steps, where each has one.
        self._step = 0
        self._rank = 0
        self._reducer: Reducer | None = None  # which tells whether a backward averages
        # In backwards that only accumulated. See Note [A gradient that is not finite].
        self._found: list[tuple[weakref.ref[Tensor], FloatingPointError]] = []
        # See Note [Gradients on a GPU]: of the backward before, and of the one under way.
        self._sent: list[_Sent] = []
        self._seen: list[_Seen] = []
        self._saw_pending_in = 0

    def watch(
        self, trained: Iterable[tuple[str, nn.Parameter, bool]], rank: int, reducer: Reducer
    ) -> None:
        """Looks at the gradients of parameters from now on.

        A backward with a gradient that is not finite raises FloatingPointError on this rank, and
        an error that names this rank on the others. One that only accumulates leaves that to the
        next one that averages, and so does one on a GPU.
        """
        if not self._looks:
            return
        self._reducer, self._rank = reducer, rank
        for name, parameter, _ in trained:
            known = self._watched.get(id(parameter))
            if known is None or known() is not parameter:
                self._watched[id(parameter)] = weakref.ref(parameter)
                self._names[id(parameter)] = name
                parameter.register_hook(_LookAtGradient(self, parameter))

    def stop(self) -> None:
        """Looks at nothing any more: others train the parameters."""
        self._looks, self._reducer = False, None
        self._forget()

    def before_forward(self, *, averages: bool) -> None:
        """Takes note of a forward."""
        self._step += averages
        self._send_seen()

    def before_step(self) -> None:
        """Takes note of an optimizer's step.

        Raises:
            FloatingPointError: A backward that only accumulated has found a gradient that is not
                finite, and the step would use it; or a step before has used one on a GPU, and
                this one does not average either.
        """
        reducer = self._reducer
        if reducer is None:
            return
        self._raise_found(reducer)
        if not reducer.enabled:  # this rank trains apart
            self._raise_sent()
            self._look_at_pending(reducer)
        self._send_seen(are_used=not reducer.enabled)

    def before_sync(self) -> None:
        """Takes note of an average outside of backward.

        Raises:
            FloatingPointError: As in backward.
        """
        if self._reducer is not None:
            self._raise_all(self._reducer)
            self._look_at_pending(self._reducer)

    def settle(self) -> None:
        """Waits for what GPUs have seen in the backwards until now.

        Raises:
            FloatingPointError: A gradient was not finite.
        """
        self._send_seen()
        self._raise_sent()

    def look_at(self, gradient: Tensor, parameter: Tensor) -> None:
        """Looks at a gradient of this rank's that backward has computed.

        Raises:
            FloatingPointError: It is not finite, or one is not that an earlier backward
                accumulated, or averaged on a GPU.
            InvalidUsage: It is computed by a CUDA graph, at whose replays nobody looks.
        """
        reducer = self._reducer
        if reducer is None:
            return
        averages = reducer.is_in_backward
        if gradient.is_cuda and reducer.is_capturing:
            raise InvalidUsage(
                "check_finite=True looks at no gradient in replays of a CUDA graph: wrap the model "
                "that is captured without it"
            )
        if averages:
            self._raise_all(reducer)
        if gradient.is_cuda:
            if averages:
                if self._saw_pending_in != self._step:
                    self._look_at_pending(reducer)
                self._see(gradient, parameter, reducer)
            return
        nan, inf = _not_finite(gradient)
        if not nan and not inf:
            return
        # The forward that averages, and counts, is yet to come.
        step = self._step if averages else self._step + 1
        kind = "backward" if averages else "backward, which accumulates,"
        error = FloatingPointError(
            f"the gradient of parameter {self._names[id(parameter)]} on rank {self._rank} has "
            f"{nan} NaN and {inf} Inf among {gradient.numel()} elements in step {step}; of the "
            f"parameters that this {kind} has reached it is the first one"
        )
        if averages:
            raise error
        if not self._found:
            logger.warning("%s. It is raised when it is averaged.", error)
        self._found.append((weakref.ref(parameter), error))

    def _raise_all(self, reducer: Reducer) -> None:
        self._raise_found(reducer)
        self._raise_sent()

    def _raise_found(self, reducer: Reducer) -> None:
        """Raises what backwards that only accumulated have found, once, where it is still there."""
        if not self._found:
            return
        found, self._found = self._found, []
        pending = {id(each) for each in reducer.pending}
        for known, error in found:
            parameter = known()
            if parameter is None or id(parameter) not in pending:
                continue
            if parameter.grad is None or any(_not_finite(parameter.grad)):
                raise error

    def _look_at_pending(self, reducer: Reducer) -> None:
        """Lets GPUs look at what was accumulated and not averaged."""
        self._saw_pending_in = self._step
        for parameter in reducer.pending:
            gradient = parameter.grad
            if gradient is not None and gradient.is_cuda and id(parameter) in self._names:
                self._see(gradient, parameter, reducer)

    def _see(self, gradient: Tensor, parameter: Tensor, reducer: Reducer) -> None:
        name, numel = self._names[id(parameter)], gradient.numel()
        rounds = reducer.rounds_concluded
        self._seen.append(_Seen(name, numel, _largest(gradient), self._step, rounds))

    def _send_seen(self, *, are_used: bool = False) -> None:
        """Sends on what GPUs have seen in backwards that are over, in which nobody raised."""
        if not self._seen:
            return
        seen, self._seen = self._seen, []
        assert self._reducer is not None
        concluded = self._reducer.rounds_concluded
        if seen := [each for each in seen if are_used or each.rounds_before < concluded]:
            values = torch.stack([each.largest for each in seen])
            self._sent.append(_Sent(seen, values, send_number(values.isfinite().all())))

    def _raise_sent(self) -> None:
        sent, self._sent = self._sent, []
        for each in sent:
            if each.are_finite.read():
                continue
            self._forget()
            values = each.values.tolist()
            bad = [k for k, value in enumerate(values) if not math.isfinite(value)]
            first, value = each.seen[bad[0]], values[bad[0]]
            raise FloatingPointError(
                f"the gradient of parameter {first.name} on rank {self._rank} had "
                f"{'NaN' if math.isnan(value) else 'Inf'} among its {first.numel} elements in step "
                f"{first.step}; of {len(bad)} such gradients among {len(values)} it is the first "
                "one that backward reached. A GPU tells so a step late, when parameters have been "
                "stepped with it: take up training again from before that step"
            )

    def _forget(self) -> None:
        self._found.clear()
        self._sent.clear()
        self._seen.clear()


@dataclass(frozen=True)
class _Seen:
    """A gradient that a GPU has looked at."""

    name: str
    numel: int
    largest: Tensor
    step: int
    rounds_before: int


@dataclass(frozen=True)
class _Sent:
    seen: list[_Seen]
    values: Tensor
    are_finite: LateNumber


class _LookAtGradient:
    """A hook on one parameter, which autograd calls with this rank's own gradient."""

    def __init__(self, check: FiniteCheck, parameter: Tensor) -> None:
        self._check = weakref.ref(check)
        self._parameter = weakref.ref(parameter)

    def __call__(self, gradient: Tensor) -> None:
        check, parameter = self._check(), self._parameter()
        if check is not None and parameter is not None:
            check.look_at(gradient, parameter)


def _values_of(gradient: Tensor) -> Tensor:
    values = gradient.detach()
    return values.coalesce().values() if values.is_sparse else values


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _largest(gradient: Tensor) -> Tensor:
    """The largest magnitude, on the device: NaN or Inf where an element is."""
    parts = _real(_values_of(gradient))
    return torch.linalg.vector_norm(parts, math.inf) if parts.numel() else parts.new_zeros(())


def _not_finite(gradient: Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many Inf."""
    values = _values_of(gradient)
    # One number for the host: a sum of finite elements may overflow, but then it is looked at.
    if math.isfinite(float(_real(values).sum(dtype=torch.float64))):
        return 0, 0
    return int(values.isnan().sum()), int(values.isinf().sum())
