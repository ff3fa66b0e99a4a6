"""Packs the buffers of rank 0 into one message, and takes them out of it on the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pydist.errors import InvalidUsage

if TYPE_CHECKING:
    from pydist._native import Communicator

# Alignment of each buffer in the message: that of the widest dtype, and whole cache lines.
_ALIGNMENT_BYTES = 64


class BufferSync:
    """The buffers of a module as one message of bytes, whatever their dtypes.

    All ranks construct it together.

    Attributes:
        memory: The message, on symmetric memory.
    """

    def __init__(self, communicator: Communicator, module: nn.Module) -> None:
        self._owners: list[tuple[str, nn.Module, str]] = []
        self._places: list[Tensor] = []
        places: list[tuple[int, Tensor]] = []
        size_bytes = 0
        for name, buffer in module.named_buffers():
            path, _, attribute = name.rpartition(".")
            self._owners.append((name, module.get_submodule(path), attribute))
            places.append((size_bytes, buffer))
            size_bytes += buffer.numel() * buffer.element_size()
            size_bytes += -size_bytes % _ALIGNMENT_BYTES
        self.memory = communicator.symmetric_empty([size_bytes], torch.uint8).zero_()
        for begin, buffer in places:
            end = begin + buffer.numel() * buffer.element_size()
            place = self.memory[begin:end].view(buffer.dtype).view(buffer.shape)
            self._places.append(place)

    @torch.no_grad()
    def pack(self) -> None:
        """Writes the buffers into the message."""
        for place, buffer in zip(self._places, self._buffers(), strict=True):
            place.copy_(buffer)

    def unpack(self) -> None:
        """Sets the buffers to what the message holds."""
        for place, buffer in zip(self._places, self._buffers(), strict=True):
            # Not through autograd: a graph that is still alive has saved the buffer, and its own
            # backward does not depend on this value having stayed the same.
            buffer.data.copy_(place)

    def _buffers(self) -> Iterator[Tensor]:
        for place, (name, owner, attribute) in zip(self._places, self._owners, strict=True):
            buffer = getattr(owner, attribute)
            if not isinstance(buffer, Tensor) or (buffer.dtype, buffer.shape) != (
                place.dtype,
                place.shape,
            ):
                raise InvalidUsage(
                    f"buffer {name} was {tuple(place.shape)} {place.dtype} when "
                    "pydist.DataParallel wrapped the module and no longer is: change it before "
                    "wrapping, or pass broadcast_buffers=False"
                )
            yield buffer
