"""Averages the gradients of a module over the ranks while backward still runs.

A bucket of the arena is all-reduced, asynchronously, as soon as it and all buckets before it are
complete; the end of backward launches what is left and waits for everything.

Note [A backward, not a forward]
A synchronisation belongs to one outermost backward. A hook on the outputs of forward announces
it, because such a hook runs in the outermost graph task, also where all parameters get their
gradients in reentrant ones (activation checkpointing). The engine's end-of-backward callback is
queued there; it owns the `_Backward` object, so that object dies without having been finished
exactly when a backward has raised. Where nothing announced it (the loss did not come from the
outputs of forward), the first parameter does; a nested graph task may then be synchronised before
the outer one, and what comes later goes in a second round. That costs time and changes nothing:
averaging what is already the same on all ranks leaves it as it is.

Note [The tail]
The last bucket to be launched carries one word for each parameter, "this rank has a gradient
here", and one for each rank, "my backward raised". Every rank launches every bucket in every
round, with zeros where it has nothing, so ranks that use different parameters never wait for each
other; a parameter that no rank used keeps the gradient that it had.

Not thread safe: one backward at a time, as with the gradients themselves.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pydist.errors import Error, InvalidUsage
from pydist.gradient_arena import Bucket, GradientArena, Slot

if TYPE_CHECKING:
    from pydist._native import Communicator, Work
    from pydist.buffer_sync import BufferSync


@dataclass(frozen=True)
class CommunicationStats:
    """What the synchronisation of gradients has cost since the last reset.

    Attributes:
        rounds: Backward passes that were synchronised.
        bytes: Bytes of gradients that were averaged, on this rank.
        wait_s: Seconds that the training thread spent launching and waiting for communication:
            the part that was not hidden behind the computation of backward.
    """

    rounds: int = 0
    bytes: int = 0
    wait_s: float = 0.0


class _Backward:
    """One outermost backward; only the engine's callback keeps it alive."""

    def __init__(self, owner: GradientSync, *, synchronizes: bool, accumulates: bool) -> None:
        self.owner = weakref.ref(owner)
        self.synchronizes = synchronizes
        # Known to be a backward() that fills gradients, even where it reaches no parameter.
        self.accumulates = accumulates
        self.finished = False

    def finish(self) -> None:
        self.finished = True
        owner = self.owner()
        if owner is not None:
            owner.finish(self)

    def __del__(self) -> None:
        owner = self.owner()
        if not self.finished and owner is not None:
            owner.abandon(self)


class GradientSync:
    """The arena, the buckets and the hooks of one module. All ranks construct it together."""

    def __init__(
        self,
        communicator: Communicator,
        parameters: Sequence[tuple[str, nn.Parameter]],
        buffers: BufferSync | None,
        bucket_cap_bytes: int,
    ) -> None:
        self.enabled = True
        self._communicator = communicator
        self._buffers = buffers
        arena = GradientArena(communicator, parameters, bucket_cap_bytes)
        self._slots = arena.slots
        self._buckets = arena.buckets
        self._tail = arena.tail

        self._current: weakref.ref[_Backward] | None = None
        self._round = 0
        self._launched = 0  # buckets of this round
        self._fired = 0  # parameters of this round
        self._works: list[Work] = []
        self._absent: list[tuple[Slot, Tensor | None]] = []
        self._stats = CommunicationStats()
        self._restart()

        # A hook that held `self` would keep the whole thing alive as long as the parameters.
        owner = weakref.ref(self)
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(_parameter_hook(owner, slot))
            for slot in self._slots
        ]
        weakref.finalize(self, _remove, self._handles)

    # -- what the hooks call

    def announce(self) -> None:
        """Starts a round; called by the hook on the outputs of forward."""
        if self._current is None or self._current() is None:
            self._begin(accumulates=_fills_gradients(torch._C._current_autograd_node()))

    def accumulated(self, slot: Slot) -> None:
        """Notes that a parameter received a gradient, and launches what is complete."""
        backward = self._current() if self._current is not None else None
        if backward is None:
            backward = self._begin(accumulates=True)
        late = slot.fired_in == self._round
        if late and slot.bucket.number < self._launched:
            raise InvalidUsage(
                f"parameter {slot.name} received a second gradient within one backward, after its "
                "bucket was sent: it is shared by several reentrant activation checkpoints, or by "
                "one and the model outside; pass use_reentrant=False to "
                "torch.utils.checkpoint.checkpoint"
            )
        if not slot.holds_gradient():
            slot.adopt()
        slot.pending = True
        if late or not backward.synchronizes:
            return
        slot.fired_in = self._round
        slot.bucket.missing -= 1
        self._fired += 1
        while self._launched < len(self._buckets) and not self._next_bucket().missing:
            self._launch(raised=False)

    def finish(self, backward: _Backward) -> None:
        """Sends what is left and waits; called by the engine at the end of backward."""
        self._current = None
        if not backward.synchronizes or not (self._fired or backward.accumulates):
            return
        if not any(slot.parameter.requires_grad for slot in self._slots):
            return
        try:
            with torch.no_grad():
                self._launch_rest(raised=False)
                self._wait()
                self._settle()
        finally:
            self._restart()

    def abandon(self, backward: _Backward) -> None:
        """Keeps the ranks in step after a backward that raised here.

        The peers are in the same round or will be: they get everything they wait for, and are told
        that it is worth nothing.
        """
        self._current = None
        if not backward.synchronizes or not (self._fired or backward.accumulates):
            return
        # A group that failed has told everybody already. The caller sees the exception of the
        # backward itself.
        with contextlib.suppress(Exception), torch.no_grad():
            self._launch_rest(raised=True)
        orphans = self._works
        self._restart()
        self._works = orphans

    # -- the round

    def drain(self) -> None:
        """Waits for what an abandoned backward left under way."""
        if self._works and (self._current is None or self._current() is None):
            try:
                self._wait()
            finally:
                self._restart()

    def _begin(self, *, accumulates: bool) -> _Backward:
        self.drain()
        backward = _Backward(self, synchronizes=self.enabled, accumulates=accumulates)
        self._current = weakref.ref(backward)
        engine = torch.autograd.Variable._execution_engine
        engine.queue_callback(backward.finish)
        return backward

    def _restart(self) -> None:
        self._round += 1
        self._launched = 0
        self._fired = 0
        self._works = []
        self._absent = []
        for bucket in self._buckets:
            bucket.missing = len(bucket.slots)

    def _next_bucket(self) -> Bucket:
        return self._buckets[self._launched]

    def _launch(self, *, raised: bool) -> None:
        """Sends the next bucket of the plan."""
        bucket = self._next_bucket()
        if not raised:  # otherwise nobody looks at the values
            for slot in bucket.slots:
                if not (slot.pending and slot.holds_gradient()):
                    self._absent.append((slot, self._fill_absent(slot)))
        if bucket is self._buckets[-1]:
            self._write_tail(raised=raised)
        self._launched += 1
        self._submit(
            lambda: self._communicator.all_reduce(
                bucket.memory, bucket.memory, "mean", True, label=bucket.label
            )
        )

    def _launch_rest(self, *, raised: bool) -> None:
        while self._launched < len(self._buckets):
            self._launch(raised=raised)
        if self._buffers is not None:
            self._submit(self._buffers.launch)

    def _submit(self, start: Callable[[], Work | None]) -> None:
        begin_s = time.perf_counter()
        work = start()
        if work is not None:
            self._works.append(work)
        self._add_wait(time.perf_counter() - begin_s)

    def _fill_absent(self, slot: Slot) -> Tensor | None:
        """Gives the slot of a parameter that backward did not reach a value to send.

        Returns:
            What to put back if no other rank used the parameter either; None if it had nothing.
        """
        if slot.parameter.grad is None:
            slot.view.zero_()
            return None
        if not slot.holds_gradient():
            slot.adopt()
        return slot.view.clone()

    def _write_tail(self, *, raised: bool) -> None:
        count = len(self._slots)
        self._tail[:count] = 1
        self._tail[count:] = 0
        if self._absent:
            self._tail[torch.tensor([slot.index for slot, _ in self._absent])] = 0
        if raised:
            self._tail[count + self._communicator.rank] = 1

    def _wait(self) -> None:
        begin_s = time.perf_counter()
        for work in self._works:
            work.wait()
        self._add_wait(time.perf_counter() - begin_s)

    def _settle(self) -> None:
        """Draws the conclusions from a round that is complete."""
        count = len(self._slots)
        for slot in self._slots:
            slot.pending = False
        self._stats = CommunicationStats(
            self._stats.rounds + 1,
            self._stats.bytes + sum(b.memory.numel() * b.memory.itemsize for b in self._buckets),
            self._stats.wait_s,
        )
        raised = [rank for rank, word in enumerate(self._tail[count:].tolist()) if word > 0]
        if raised:
            ranks = ", ".join(map(str, raised))
            raise Error(
                f"backward raised on rank {ranks}, so the gradients of this step are incomplete "
                "on every rank: the exception is there; set the gradients to zero before the next "
                "step"
            )
        if self._absent:
            used = self._tail[:count].tolist()
            for slot, before in self._absent:
                if used[slot.index] > 0:
                    if not slot.holds_gradient():
                        slot.parameter.grad = slot.view.detach()
                elif before is not None:
                    slot.view.copy_(before)
        if self._buffers is not None:
            self._buffers.settle()

    # -- statistics

    @property
    def stats(self) -> CommunicationStats:
        """The costs since the last reset."""
        return self._stats

    def reset_stats(self) -> None:
        """Starts counting from zero."""
        self._stats = CommunicationStats()

    def _add_wait(self, seconds: float) -> None:
        stats = self._stats
        self._stats = CommunicationStats(stats.rounds, stats.bytes, stats.wait_s + seconds)


def outputs_with_graph(outputs: Any) -> Iterator[Tensor]:
    """Finds the tensors in the outputs of a forward that a backward can start from.

    Args:
        outputs: Tensors in any nesting of lists, tuples, mappings and dataclasses.
    """
    if isinstance(outputs, Tensor):
        if outputs.grad_fn is not None:
            yield outputs
    elif isinstance(outputs, dict):
        for value in outputs.values():
            yield from outputs_with_graph(value)
    elif isinstance(outputs, (list, tuple)):
        for value in outputs:
            yield from outputs_with_graph(value)
    elif hasattr(outputs, "__dataclass_fields__"):
        for name in outputs.__dataclass_fields__:
            yield from outputs_with_graph(getattr(outputs, name, None))


def _fills_gradients(node: torch.autograd.graph.Node | None) -> bool:
    """Whether the graph task that evaluates `node` is a backward(), not an autograd.grad().

    Tells by the nearest leaf below the node: backward() visits every leaf, autograd.grad() none
    but to capture its gradient, about which the engine refuses to answer.
    """
    queue = deque([node] if node is not None else [])
    seen = set(queue)
    while queue:
        current = queue.popleft()
        if hasattr(current, "variable"):
            try:
                return bool(torch._C._will_engine_execute_node(current))
            except RuntimeError:
                return False
        for child, _ in current.next_functions:
            if child is not None and child not in seen:
                seen.add(child)
                queue.append(child)
    return False


def _parameter_hook(owner: weakref.ref[GradientSync], slot: Slot) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        sync = owner()
        if sync is not None:
            sync.accumulated(slot)

    return hook


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()
