"""Packs the buffers of one rank into one message, and takes them out of it on the other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pydist._torch import NormBase, buffers_of, runs_uncompiled, runs_uncompiled_throughout
from pydist.errors import InvalidUsage
from pydist.parallel.buffers.buffer_changes import BufferChanges
from pydist.parallel.buffers.buffer_values import BufferValues
from pydist.parallel.buffers.device_values import DeviceValues
from pydist.parallel.buffers.running_statistics import RunningStatistics
from pydist.parallel.rank_local import RankLocal
from pydist.parallel.sync_batch_norm import SyncBatchNorm

if TYPE_CHECKING:
    from pydist._native import Communicator

_STATISTICS = ("running_mean", "running_var")

# Alignment of each buffer in the message: that of the widest dtype, and whole cache lines.
_ALIGNMENT_BYTES = 64


class BufferSync:
    """The buffers of a module that are no rank's own, as one message of bytes of whatever dtypes.

    All ranks construct it together.

    Attributes:
        memory: The message, on symmetric memory: the buffers as they were last exchanged, at first
            those at construction.
        is_enabled: Whether this rank asks for an exchange where it has changed its buffers. All
            ranks set it alike; any of them has its way.
        changes: What the program changes between steps.
        statistics: What forwards do to running statistics.
    """

    def __init__(self, communicator: Communicator, module: RankLocal) -> None:
        self._communicator = communicator
        self._module = module
        self.is_enabled = True
        self.changes = BufferChanges()
        self._on_device = DeviceValues()
        self._lay_out()

    @runs_uncompiled_throughout
    def renew(self) -> Tensor:
        """Lays out the message anew, for the buffers that the module has now; returns its memory.

        All ranks call it together.
        """
        self._lay_out()
        return self.memory

    def _lay_out(self) -> None:
        self._owners: list[tuple[str, nn.Module, str]] = []
        self._tables: list[tuple[dict[str, Tensor | None], str]] = []
        self._places: list[Tensor] = []
        # The buffers whose changes between steps count, by index.
        self._watched: list[int] = []
        places: list[tuple[int, Tensor]] = []
        size_bytes = 0
        self._module.look_again()
        for name, buffer in self._module.shared_buffers():
            path, _, attribute = name.rpartition(".")
            self._owners.append((name, self._module.module.get_submodule(path), attribute))
            owner = self._owners[-1][1]
            self._tables.append((buffers_of(owner), attribute))
            if not _only_counts(owner, attribute):
                self._watched.append(len(self._owners) - 1)
            places.append((size_bytes, buffer))
            size_bytes += buffer.numel() * buffer.element_size()
            size_bytes += -size_bytes % _ALIGNMENT_BYTES
        # Beside the buffers, where they are on one device: then no step waits for a copy of them.
        devices = {buffer.device for _, buffer in places}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        self.memory = torch.zeros(0, dtype=torch.uint8)
        if size_bytes:
            self.memory = self._communicator.symmetric_empty([size_bytes], torch.uint8, device)
            self.memory.zero_()
        for begin, buffer in places:
            end = begin + buffer.numel() * buffer.element_size()
            place = self.memory[begin:end].view(buffer.dtype).view(buffer.shape)
            self._places.append(place)
        self._forms = [(place.dtype, place.shape) for place in self._places]
        self._watched_places = [self._places[number] for number in self._watched]
        self._watched_names = [self._owners[number][0] for number in self._watched]
        owners = [self._owners[number] for number in self._watched]
        self.changes.values = BufferValues(
            self._watched_places,
            [not _is_statistic(owner, attribute) for _, owner, attribute in owners],
        )
        self.statistics = RunningStatistics(
            {
                name.rpartition(".")[0] or type(owner).__name__: owner
                for name, owner, attribute in self._owners
                if _is_statistic(owner, attribute) and _differs_between_ranks(owner)
            }
            if self._communicator.size > 1
            else {}
        )
        self.pack()
        self.changes.note(self._watched_now())

    def forget(self) -> None:
        """Lets the next averaged backward copy the buffers, whether they change or not."""
        self.memory.fill_(255)  # what hardly any buffer is: not a number, and no truth value
        self.changes.values.forget()
        self._on_device.forget()

    def _watched_now(self) -> list[Any]:
        """The buffers that the module has now in the places whose changes count."""
        places = [self._tables[number] for number in self._watched]
        return [table.get(attribute) for table, attribute in places]

    @runs_uncompiled_throughout
    def before_forward(self, *, averages: bool) -> None:
        """Notices what the program has changed since the last round.

        Args:
            averages: Whether the backward of this forward averages.
        """
        if self.is_enabled and self._watched:
            self.statistics.before_forward(averages=averages)
            self.changes.before_forward(
                self._watched_now(), self._watched_places, averages=averages
            )
            self.changes.warn_where_none_is_exchanged(self._watched_names)

    @runs_uncompiled
    def during_forward_without_gradients(self) -> contextlib.AbstractContextManager[None]:
        """Lets nobody take what the forward inside changes for a change of the program's."""
        if not (self.is_enabled and self._watched):
            return contextlib.nullcontext()
        self.statistics.before_forward(averages=False)
        return self.changes.during_forward_without_gradients(
            self._watched_now, self._watched_places
        )

    @runs_uncompiled_throughout
    def has_changed(self) -> bool:
        """Whether a buffer is no longer what the message says.

        By value: BatchNorm's kernels change its statistics behind autograd's version counters. On
        a device the host would wait for the answer. There, statistics that layers keep have
        changed, and of other buffers Note [Looked at late] tells (device_values.py).
        """
        if not (self.is_enabled and self._owners):
            return False
        self.changes.warn_where_ranks_differ(self._watched_names)
        self.statistics.note_exchange()
        buffers = self._present()  # all of them must be as they were wrapped
        self.changes.note(self._watched_now())
        if self.memory.is_cuda:
            return any(
                _is_statistic(owner, name) and owner.training for _, owner, name in self._owners
            ) or self._on_device.have_changed(
                [name for name, _, _ in self._owners], self._places, buffers
            )
        # They may have moved since.
        pairs = zip(self._places, buffers, strict=True)
        return any(not torch.equal(place, buffer.to(place.device)) for place, buffer in pairs)

    @torch.no_grad()
    @runs_uncompiled_throughout
    def pack(self) -> None:
        """Writes the buffers into the message."""
        buffers = self._present()
        for place, buffer in zip(self._places, buffers, strict=True):
            place.copy_(buffer)
        self._note_on_device(buffers)

    @torch.no_grad()
    @runs_uncompiled_throughout
    def unpack(self) -> None:
        """Sets the buffers to what the message holds."""
        buffers, others = self._present(), []
        for (_, owner, _), place, buffer in zip(self._owners, self._places, buffers, strict=True):
            if isinstance(owner, NormBase):
                # Written past autograd, as BatchNorm's own kernels do. A graph that has saved the
                # statistics would otherwise refuse to go backward, though in training it does not
                # use them; and none saves the count of batches.
                buffer.data.copy_(place)
            else:
                others.append((place, buffer))
        # A graph that has saved one of these computes with it, and may go backward yet: it is left
        # alone where it is right already. On a device the host waits for that once.
        if others:
            changed = [(place != buffer.to(place.device)).any() for place, buffer in others]
            are_others = torch.stack(changed).tolist()
            for (place, buffer), is_another in zip(others, are_others, strict=True):
                if is_another:
                    buffer.copy_(place)
        self._note_on_device(buffers)
        self.changes.note(self._watched_now())

    def _note_on_device(self, buffers: Sequence[Tensor]) -> None:
        if self.memory.is_cuda:
            self._on_device.note(buffers)

    def _present(self) -> list[Tensor]:
        """The buffers that the module has now.

        Raises:
            InvalidUsage: One is not what it was when the module was wrapped.
        """
        # Every step asks, several times: what modules say, one by one, takes longer.
        now = [table.get(attribute) for table, attribute in self._tables]
        buffers = [buffer for buffer in now if isinstance(buffer, Tensor)]
        if [(buffer.dtype, buffer.shape) for buffer in buffers] == self._forms:
            return buffers
        return [
            _as_wrapped(name, getattr(owner, attribute), form)
            for (name, owner, attribute), form in zip(self._owners, self._forms, strict=True)
        ]


def _as_wrapped(name: str, buffer: Any, form: tuple[torch.dtype, torch.Size]) -> Tensor:
    dtype, shape = form
    if not isinstance(buffer, Tensor) or (buffer.dtype, buffer.shape) != form:
        raise InvalidUsage(
            f"buffer {name} was {tuple(shape)} {dtype} when pydist.DataParallel wrapped the module "
            "and no longer is: change it before wrapping (by a first forward, where that does so, "
            "as observers of quantization do), or pass broadcast_buffers=False"
        )
    return buffer


def _is_statistic(owner: nn.Module, attribute: str) -> bool:
    """Whether a buffer is one that a layer's own kernels update in each forward in training."""
    return isinstance(owner, NormBase) and attribute in _STATISTICS


def _differs_between_ranks(owner: nn.Module) -> bool:
    """Whether a layer's statistics are of one rank's batches."""
    return not isinstance(owner, SyncBatchNorm | nn.SyncBatchNorm)


def _only_counts(owner: nn.Module, attribute: str) -> bool:
    """Whether a buffer counts a layer's forwards, and no forward computes with it.

    Every forward in training changes such a count, also the first of two before one backward. On a
    device the host would wait there for its value.
    """
    is_count = isinstance(owner, NormBase)
    return is_count and attribute == "num_batches_tracked" and owner.momentum is not None
