"""Watches that the gradients of a wrapped model are finite (`check_finite=`).

Note [A gradient that is not finite]
What a rank raises in a backward that averages, the others learn in that backward. A backward that
only accumulates meets nobody: were it to raise, this rank would leave its step, and the others
would average that step's gradients with its next one's. So what is found there is logged, and
raised by what averages it, a backward or `sync_gradients()`, or by a step that comes before it;
unless the gradient has been thrown away by then.

Note [Gradients on a GPU]
To read a gradient there would stop the host until it is computed. So the GPU itself looks at what a
backward averages: at this rank's gradients, and at those that were accumulated before (`_seen`).
Behind that backward, what it has seen is sent to the host (`_sent`), and a later backward raises
it, as a rule the next one that averages, from which the others learn it. By then a step has been
taken with it. A backward that raised is not told of: its gradients were never used.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pydist._torch import uncoalesced_values
from pydist.errors import InvalidUsage
from pydist.gpu.late_number import LateNumber, send_number
from pydist.job.log import logger

if TYPE_CHECKING:
    from pydist._native import Reducer


# How many backwards may be on their way to the host before it waits for the first of them.
_MOST_UNDER_WAY = 16


class FiniteCheck:
    """What one wrapper watches, if that is asked for.

    Args:
        looks: Whether it is.
    """

    def __init__(self, looks: bool) -> None:
        self._looks = looks
        # With their names. By id: to compare tensors is to compare their elements.
        self._watched: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        # Forwards that average, with the present one: steps, where each has one.
        self._step = 0
        self._rank = 0
        self._reducer: Reducer | None = None  # which tells whether a backward averages
        # In backwards that only accumulated. See Note [A gradient that is not finite].
        self._found: list[tuple[weakref.ref[Tensor], FloatingPointError]] = []
        # See Note [Gradients on a GPU].
        self._seen: list[_Seen] = []
        self._sent: deque[_Sent] = deque()
        # Of both: hooks run on a thread for each device, and a signal may come amid a send.
        self._lock = threading.RLock()
        # In which round each device has looked at what was accumulated before.
        self._rounds: dict[torch.device, int] = {}

    def watch(
        self, trained: Iterable[tuple[str, nn.Parameter, bool]], rank: int, reducer: Reducer
    ) -> None:
        """Looks at the gradients of parameters from now on.

        A backward with a gradient that is not finite raises FloatingPointError on this rank, and
        an error that names this rank on the others. One that only accumulates leaves that to the
        next one that averages, and one on a GPU to a later one.
        """
        if not self._looks:
            return
        self._reducer, self._rank = reducer, rank
        for name, parameter, _ in trained:
            if self._name_of(parameter) is None:
                self._watched[id(parameter)] = weakref.ref(parameter), name
                parameter.register_hook(_LookAtGradient(self, parameter))

    def stop(self) -> None:
        """Looks at nothing any more: others train the parameters."""
        self._looks, self._reducer = False, None
        self.forget()

    def forget(self) -> None:
        """Tells of nothing that was found until now: training is taken up from elsewhere."""
        self._found.clear()
        self._seen.clear()
        self._sent.clear()

    def after_forward(self, *, averages: bool) -> None:
        """Takes note of a forward that may go backward."""
        if self._reducer is not None:
            self._step += averages
            self._send_seen(self._reducer)

    def before_step(self, *, uses_pending: bool) -> None:
        """Takes note of an optimizer's step.

        Args:
            uses_pending: Whether it would use gradients that were not averaged.

        Raises:
            FloatingPointError: A backward that only accumulated has found a gradient that is not
                finite, and the step would use it; or one before has used one on a GPU, and this
                rank trains apart.
        """
        reducer = self._reducer
        if reducer is None or reducer.is_capturing:
            return
        self._send_seen(reducer)
        if uses_pending:
            self._raise_found(reducer)
            if not reducer.enabled:  # this rank trains apart
                self._raise_sent()
                self._send(self._look_at(reducer, reducer.accumulated, self._step + 1))

    def before_sync(self) -> None:
        """Takes note of an average outside of backward.

        Raises:
            FloatingPointError: As in backward.
        """
        if self._reducer is not None:
            self._send_seen(self._reducer)
            self._raise_found(self._reducer)
            self._raise_sent()
            # What was put there by hand is averaged, too.
            self._seen += self._look_at(self._reducer, self._reducer.parameters, self._step + 1)

    def settle(self) -> None:
        """Waits for what GPUs have seen in the backwards until now.

        Raises:
            FloatingPointError: A gradient was not finite.
        """
        if self._reducer is not None:
            self._send_seen(self._reducer)
            self._raise_sent(waits=True)

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
            self._raise_found(reducer)
            self._raise_sent()
        if gradient.is_cuda:
            if averages:
                self._see(gradient, parameter, reducer)
            return
        nan, inf = _not_finite(gradient)
        if not nan and not inf:
            return
        # The forward that averages, and counts, is yet to come.
        step = self._step if averages else self._step + 1
        kind = "backward" if averages else "backward, which accumulates,"
        error = FloatingPointError(
            f"the gradient of parameter {self._name_of(parameter)} on rank {self._rank} has "
            f"{nan} NaN and {inf} Inf among {gradient.numel()} elements in step {step}; of the "
            f"parameters that this {kind} has reached it is the first one"
        )
        if averages:
            raise error
        if not self._found:
            logger.warning("%s. It is raised when it is averaged.", error)
        self._found.append((weakref.ref(parameter), error))

    def _name_of(self, parameter: Tensor) -> str | None:
        """What a parameter is called; None where it is not watched."""
        known, name = self._watched.get(id(parameter), (lambda: None, ""))
        return name if known() is parameter else None

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

    def _see(self, gradient: Tensor, parameter: Tensor, reducer: Reducer) -> None:
        """Lets the GPU look at a gradient that is averaged; first, at what was accumulated there.

        Gradients of other GPUs are of other threads, whose streams nobody waits for here.
        """
        device, number = gradient.device, reducer.round
        with self._lock:
            if self._rounds.get(device) != number:
                self._rounds[device] = number
                concluded = reducer.rounds_concluded
                # Those of a round that failed go before this one is concluded.
                self._seen = [
                    each for each in self._seen if each.round == number or each.was_used(concluded)
                ]
                here = [each for each in reducer.accumulated if each.device == device]
                self._seen += self._look_at(reducer, here, self._step)
            self._seen.append(self._looked_at(gradient, parameter, reducer, self._step))

    def _look_at(self, reducer: Reducer, parameters: list[Tensor], step: int) -> list[_Seen]:
        """Lets GPUs look at what parameters hold now."""
        held = [(each, each.grad) for each in parameters if self._name_of(each) is not None]
        return [
            self._looked_at(gradient, parameter, reducer, step)
            for parameter, gradient in held
            # What stands for a shard's gradient is of a class of its own, and was averaged.
            if gradient is not None and gradient.is_cuda and type(gradient) is Tensor
        ]

    def _looked_at(self, gradient: Tensor, parameter: Tensor, reducer: Reducer, step: int) -> _Seen:
        return _Seen(
            str(self._name_of(parameter)),
            gradient.numel(),
            _largest(gradient),
            step,
            reducer.round,
            reducer.rounds_concluded,
        )

    def _send_seen(self, reducer: Reducer) -> None:
        """Sends on what GPUs have seen in backwards that are over, unless somebody raised there."""
        if not self._seen or reducer.is_capturing:
            return
        with self._lock:
            seen, number, concluded = self._seen, reducer.round, reducer.rounds_concluded
            # Otherwise the present round has not begun: autograd.grad() has computed them.
            goes_on = reducer.is_held or reducer.is_in_backward
            self._seen = [each for each in seen if goes_on and each.round == number]
            self._rounds.clear()
            self._send([each for each in seen if each.round != number and each.was_used(concluded)])

    def _send(self, seen: list[_Seen]) -> None:
        for device in dict.fromkeys(each.largest.device for each in seen):
            here = [each for each in seen if each.largest.device == device]
            values = torch.stack([each.largest for each in here])
            self._sent.append(_Sent(here, values, send_number(values.isfinite().all())))

    def _raise_sent(self, *, waits: bool = False) -> None:
        """Raises what has come of what was sent; where it `waits`, of all that was sent."""
        with self._lock:
            sent = self._sent
            while sent and (waits or sent[0].are_finite.has_come() or len(sent) > _MOST_UNDER_WAY):
                first = sent.popleft()
                if not first.are_finite.read():
                    self.forget()
                    raise first.error(self._rank)


@dataclass(frozen=True)
class _Seen:
    """A gradient that a GPU has looked at."""

    name: str
    numel: int
    largest: Tensor  # NaN or Inf where an element is
    step: int
    round: int
    rounds_before: int  # that were concluded

    def was_used(self, rounds_concluded: int) -> bool:
        """Whether its round was concluded. Asked when it is over, and no later one is."""
        return self.rounds_before < rounds_concluded


@dataclass(frozen=True)
class _Sent:
    """What a GPU has seen, on its way to the host."""

    seen: list[_Seen]
    values: Tensor
    are_finite: LateNumber

    def error(self, rank: int) -> FloatingPointError:
        """That they are not. Waits for the GPU."""
        values = self.values.tolist()
        bad = [k for k, value in enumerate(values) if not math.isfinite(value)]
        first, value = self.seen[bad[0]], values[bad[0]]
        return FloatingPointError(
            f"the gradient of parameter {first.name} on rank {rank} had "
            f"{'NaN' if math.isnan(value) else 'Inf'} among its {first.numel} elements in step "
            f"{first.step}; of {len(bad)} such gradients among {len(values)} it is the first one "
            "that backward reached. A GPU tells so late, when parameters have been stepped with "
            "it: take up training again from before that step"
        )


class _LookAtGradient:
    """A hook on one parameter, which autograd calls with this rank's own gradient."""

    def __init__(self, check: FiniteCheck, parameter: Tensor) -> None:
        self._check = weakref.ref(check)
        self._parameter = weakref.ref(parameter)

    def __call__(self, gradient: Tensor) -> None:
        check, parameter = self._check(), self._parameter()
        if check is not None and parameter is not None:
            check.look_at(gradient, parameter)


def _real(values: Tensor) -> Tensor:
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _largest(gradient: Tensor) -> Tensor:
    """The largest magnitude, on the device: NaN or Inf where an element is."""
    values = gradient.detach()
    # Of a sparse one as they are: to add up those of one place would stop the host.
    parts = _real(uncoalesced_values(values) if values.is_sparse else values)
    return torch.linalg.vector_norm(parts, math.inf) if parts.numel() else parts.new_zeros(())


def _not_finite(gradient: Tensor) -> tuple[int, int]:
    """How many elements are NaN, and how many Inf."""
    values = gradient.detach()
    if values.is_sparse:
        values = values.coalesce().values()
    # One number for the host: a sum of finite elements may overflow, but then it is looked at.
    if math.isfinite(float(_real(values).sum(dtype=torch.float64))):
        return 0, 0
    return int(values.isnan().sum()), int(values.isinf().sum())
