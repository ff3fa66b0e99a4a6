"""Where faults strike: the hooks that stand while faults are armed, and only then.

Operations are seen by replacing methods of the class of communicators, forwards and steps by
torch's global hooks of modules and optimizers, backwards by a hook on one parameter, and the rest
through `pydist.job.phases`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pydist._native import Communicator
from pydist.errors import InvalidUsage
from pydist.job import current, phases
from pydist.job.launchers import read_placement
from pydist.job.log import logger
from pydist.parallel.wrapper import DataParallel
from pydist.testing.damage import corrupt, pause, send_to_itself
from pydist.testing.exhaustion import exhausted

if TYPE_CHECKING:
    from pydist.testing.faults import Fault

KINDS = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "send",
    "recv",
    "barrier",
)
PHASES = (phases.START_UP, "forward", "backward", "step", phases.CHECKPOINT)

_is_armed = threading.Lock()


def _replace(kind: str, method: Callable[..., Any]) -> None:
    """Gives communicators another method of that name."""
    setattr(Communicator, kind, method)
    current.job.look_up()


class Armed:
    """Faults that wait for their places in this process.

    Args:
        faults: What waits.
        injected_error: Makes what "raise" raises, of a message.
    """

    def __init__(
        self, faults: Sequence[Fault], injected_error: Callable[[str], BaseException]
    ) -> None:
        self._faults = faults
        self._injected_error = injected_error
        self._pid = os.getpid()
        # How often each fault may still strike, and how many operations there were of each kind.
        # The lock guards both: operations may start in several threads.
        self._left = [fault.times for fault in faults]
        self._operations: Counter[str] = Counter()
        self._lock = threading.Lock()
        # Steps that have ended of the optimizer that counts them.
        self._steps = 0
        self._counting: weakref.ref[Optimizer] | None = None
        self._hooked: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._undo = contextlib.ExitStack()

    def arm(self) -> None:
        """Puts the hooks in place."""
        if not _is_armed.acquire(blocking=False):
            raise InvalidUsage(
                "faults are armed already, by PYDIST_FAULTS or another inject(): pass all faults "
                "to one inject()."
            )
        self._undo.callback(_is_armed.release)
        for kind in KINDS:
            self._watch_operation(kind)
        hooks = [
            register_module_forward_pre_hook(self._before_forward),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for hook in hooks:
            self._undo.callback(hook.remove)
        phases.listener = self._reach
        self._undo.callback(setattr, phases, "listener", None)

    def disarm(self) -> None:
        """Takes the hooks away, and ends what was exhausted."""
        self._undo.close()

    def _watch_operation(self, kind: str) -> None:
        method = getattr(Communicator, kind)

        def watched(communicator: Communicator, *args: Any, **kwargs: Any) -> Any:
            # What pydist does for itself in between is not counted.
            caller = sys._getframe(1).f_globals.get("__name__", "")
            if caller == "pydist.collectives" or not caller.startswith("pydist."):
                with self._lock:
                    self._operations[kind] += 1
                    number = self._operations[kind]
                self._strike([*args, *kwargs.values()], operation=kind, number=number)
            return method(communicator, *args, **kwargs)

        _replace(kind, watched)
        self._undo.callback(_replace, kind, method)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if not isinstance(module, DataParallel):
            return
        if module not in self._hooked:
            self._hooked.add(module)
            trained = [each for each in module.parameters() if each.requires_grad]
            if trained:
                hook = trained[len(trained) // 2].register_hook(self._in_backward)
                self._undo.callback(hook.remove)
        self._strike(module, phase="forward")

    def _in_backward(self, gradient: Tensor) -> None:
        self._strike(gradient, phase="backward")

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._counting is None or self._counting() is None:
            self._counting = weakref.ref(optimizer)
        if self._counting() is optimizer:
            self._strike(optimizer, phase="step")

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._counting is not None and self._counting() is optimizer:
            self._steps += 1

    def _reach(self, phase: str, about: object) -> None:
        self._strike(about, phase=phase)

    def _strike(
        self,
        about: Any,
        *,
        phase: str | None = None,
        operation: str | None = None,
        number: int | None = None,
    ) -> None:
        if os.getpid() != self._pid:
            return
        for index, fault in enumerate(self._faults):
            if (fault.phase, fault.operation) != (phase, operation):
                continue
            if fault.number not in (None, number) or fault.step not in (None, self._steps + 1):
                continue
            rank = _own_rank()
            if fault.rank not in (None, rank):
                continue
            with self._lock:
                if self._left[index] == 0:
                    continue
                self._left[index] -= 1
            self._perform(fault, rank, about)

    def _perform(self, fault: Fault, rank: int, about: Any) -> None:
        where = f"{fault.where()} on rank {rank}"
        logger.warning("%s on purpose in %s (pydist.testing.faults)", fault.action, where)
        if fault.action == "kill":
            send_to_itself(signal.SIGKILL, fault.seconds)
        elif fault.action == "stop":
            send_to_itself(signal.SIGSTOP, fault.seconds)
        elif fault.action == "delay":
            pause(fault.seconds)
        elif fault.action == "corrupt":
            corrupt(fault.phase, about)
        elif fault.action == "raise":
            raise fault.error or self._injected_error(f"raised on purpose in {where}")
        elif fault.action == "exhaust-descriptors":
            self._undo.enter_context(exhausted("descriptors", spare=fault.spare))
        elif fault.action == "exhaust-threads":
            self._undo.enter_context(exhausted("threads"))
        else:
            self._undo.enter_context(exhausted("memory", spare=fault.spare))


def _own_rank() -> int:
    """In the world; before it is joined, what the launcher says."""
    member = current.job.membership
    return read_placement().rank if member is None else member.rank
