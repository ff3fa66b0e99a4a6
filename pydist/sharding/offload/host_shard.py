"""This rank's shard of a bucket in pinned memory, and its copies to and from the GPU.

Note [Who may write where]: every piece of memory that two sides use has one event for each use.

- The gradients on the GPU are read by the copy to the host: the next backward waits for its event,
  on the device (`before_reduction`). A copy that no step has taken may be torn: it is made again.
- The gradients on the host are read by the step. With a delayed step, the next copy may come before
  that step is over, so there are two places for them, which take turns.
- The values on the host are read by the copy to the GPU: the step that writes them next waits for
  its event, on the host (`wait_for_upload`). It has nearly always passed.
- The values on the GPU are read by forward and backward: the copy waits for the current stream.

Note [What the program has written]: without offload, a step starts from the parameters as they are,
whoever has written them. Here it starts from the values on the host. So the shard on the GPU has a
digest, taken when the values came there and taken again before the next step; where the two
differ, the values are fetched first. No count of writes would do: `parameter.data` has none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from pydist import _native
from pydist._torch import VERSION, as_plain_tensors
from pydist.gpu.late_number import LateNumber, send_number
from pydist.sharding.buckets import SHORT, Bucket
from pydist.sharding.offload.digest import digest_of
from pydist.sharding.offload.side_streams import SideStreams, behind_current, wait_on_host


class HostShard:
    """The shard of one bucket. Moves the bucket's segments to the host.

    Args:
        bucket: On a GPU; its segments have no float32 copies yet, and no optimizer.
        streams: Of its device.
        gradient_places: In pinned memory: 2 where a step may run beside the next backward.
    """

    def __init__(self, bucket: Bucket, streams: SideStreams, *, gradient_places: int) -> None:
        self._on_device = bucket.shard
        self._reduced = bucket.gradients
        self._streams = streams
        self._values = pinned_like(bucket.shard)
        self._values.copy_(bucket.shard)
        self._places = [pinned_like(bucket.shard) for _ in range(gradient_places)]
        self._place = 0
        # Where each segment lies in the shard, in elements of the shard's dtype.
        self._ranges = [_range_in(bucket.shard, segment.values) for segment in bucket.segments]
        self._known = torch.zeros((), dtype=torch.int64, device=bucket.shard.device)
        self._known.copy_(digest_of(bucket.shard))
        self._looked: torch.Event | None = None
        self._copied: torch.Event | None = None
        self._uploaded: torch.Event | None = None
        # The version of the reduced gradients that have been copied, and by what they have been
        # multiplied since.
        self._copied_version: int | None = None
        self._factor: LateNumber | None = None
        self._sources: list[Tensor] = []
        self._move(bucket)

    def _move(self, bucket: Bucket) -> None:
        """Gives the bucket segments on the host; those in 16 bits have float32 copies."""
        for segment, (begin, count) in zip(bucket.segments, self._ranges, strict=True):
            segment.values = self._values.narrow(0, begin, count)
            is_short = segment.values.dtype in SHORT
            segment.updated = segment.values.float() if is_short else segment.values
            segment.gradient = None

    # -- gradients, to the host

    def before_reduction(self) -> None:
        """Before the gradients on the GPU are written: the current stream waits for their copy."""
        if self._copied is not None:
            self._copied.wait()

    def after_reduction(self, work: _native.Work) -> None:
        """Starts the copy of the gradients, behind their reduction; nobody waits.

        Args:
            work: The reduction, for which streams can wait.
        """
        if self._reduced is None or self._reduced.numel() == 0:
            return
        with self._streams.to_host:
            work.wait()
            self._copy_reduced_here()

    @contextlib.contextmanager
    def scaling(self, factor: Tensor, present: set[int], bucket: Bucket) -> Iterator[None]:
        """Around a multiplication of some gradients by a number, in place.

        If it is all of the bucket's, and the first since their copy, the step multiplies what was
        copied, to the same bits, rather than copying again.

        Args:
            factor: By what.
            present: The numbers of the parameters.
            bucket: The shard's.
        """
        self.before_reduction()
        was_copied = self._reduced is not None and not self._is_changed()
        yield
        if not was_copied or self._reduced is None:
            return
        with as_plain_tensors():
            scaled = [
                segment.member.index in present
                for segment in bucket.segments
                if segment.values.numel() != 0 and segment.member.parameter.grad is not None
            ]
        if any(scaled):
            # In 16 bits the product is rounded, which the step would not do.
            if not all(scaled) or self._factor is not None or self._reduced.dtype in SHORT:
                return
            self._factor = send_number(factor)
        # Buckets share the count of writes.
        self._copied_version = VERSION(self._reduced)

    def send_gradients(self, gradients: list[Tensor | None], is_reduced: bool) -> None:
        """Starts what has not been copied since the gradients were reduced, or has changed since.

        Args:
            gradients: This rank's part of each segment's, on the GPU, where it has one that is not
                among the reduced ones.
            is_reduced: Whether any is among those.
        """
        if is_reduced and self._is_changed():
            self.copy_reduced()
        if any(gradient is not None for gradient in gradients):
            place = self._places[self._place]
            with behind_current(self._streams.to_host):
                for gradient, (begin, count) in zip(gradients, self._ranges, strict=True):
                    if gradient is not None:
                        self._sources.append(gradient)
                        target = place.narrow(0, begin, count)
                        target.copy_(gradient, non_blocking=True)
                self._record_copied()
            # The program may write there next; the reducer asks before.
            self.before_reduction()

    def _is_changed(self) -> bool:
        return self._reduced is not None and self._copied_version != VERSION(self._reduced)

    def copy_reduced(self) -> torch.Event:
        """Starts a copy of the reduced gradients, behind the current stream.

        Returns:
            What passes when they are on the host.
        """
        with behind_current(self._streams.to_host):
            return self._copy_reduced_here()

    def _copy_reduced_here(self) -> torch.Event:
        assert self._reduced is not None
        self._places[self._place].copy_(self._reduced, non_blocking=True)
        self._copied_version = VERSION(self._reduced)
        self._factor = None
        return self._record_copied()

    def _record_copied(self) -> torch.Event:
        self._copied = torch.Event(self._on_device.device)
        self._copied.record()
        return self._copied

    def take_gradients(self) -> tuple[list[Tensor], TakenGradients]:
        """Gives what has been sent to a step; what is sent next goes elsewhere where it must.

        Returns:
            The place of each segment's, and what to wait for before reading there.
        """
        arriving = self.places()
        self._place = (self._place + 1) % len(self._places)
        taken = TakenGradients(self._copied, self._factor, self._sources)
        self._copied_version, self._factor, self._sources = None, None, []
        return arriving, taken

    def places(self) -> list[Tensor]:
        """Where the gradient of each segment goes next."""
        place = self._places[self._place]
        return [place.narrow(0, begin, count) for begin, count in self._ranges]

    # -- values

    def look_for_writes(self) -> LateNumber:
        """Starts to find out whether the program has written values on the GPU.

        Returns:
            1 if it has, since they were there last.
        """
        with behind_current(self._streams.to_host):
            if self._uploaded is not None:
                self._uploaded.wait()
            digest = digest_of(self._on_device)
            is_written = send_number(digest != self._known)
            self._known.copy_(digest)
            self._looked = torch.Event(self._on_device.device)
            self._looked.record()
        return is_written

    def fetch_values(self) -> None:
        """Takes over the values on the GPU. Waits for them."""
        with self._streams.to_host:
            self._values.copy_(self._on_device, non_blocking=True)
            fetched = torch.Event(self._on_device.device)
            fetched.record()
        wait_on_host(fetched)

    def wait_for_upload(self) -> None:
        """Before the values on the host are written."""
        if self._uploaded is not None:
            wait_on_host(self._uploaded)

    def upload(self) -> torch.Event:
        """Starts the copy of the values to the GPU, on the stream for that, which is current.

        Returns:
            What passes when they are there.
        """
        if self._looked is not None:
            self._looked.wait()
        self._on_device.copy_(self._values, non_blocking=True)
        self._known.copy_(digest_of(self._on_device))
        self._uploaded = torch.Event(self._on_device.device)
        self._uploaded.record()
        return self._uploaded

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned memory that it has."""
        return sum(tensor.nbytes for tensor in (self._values, *self._places))


class TakenGradients:
    """Gradients that a step has been given, perhaps still on their way.

    Args:
        copied: What passes when they are there; None where there is nothing to copy.
        factor: By what to multiply them.
        sources: What they are copied from, which stays so long.
    """

    def __init__(
        self, copied: torch.Event | None, factor: LateNumber | None, sources: list[Tensor]
    ) -> None:
        self._copied = copied
        self._factor = factor
        self._sources = sources

    def arrive(self) -> float:
        """Waits for them, on the host. Returns by what to multiply them."""
        if self._copied is not None:
            wait_on_host(self._copied)
        self._sources = []
        return 1.0 if self._factor is None else self._factor.read()


def pinned_like(tensor: Tensor) -> Tensor:
    """Pinned memory for all elements of a tensor."""
    return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)


def _range_in(shard: Tensor, values: Tensor) -> tuple[int, int]:
    begin = int(values.storage_offset()) - int(shard.storage_offset())
    return begin if values.numel() else 0, values.numel()
