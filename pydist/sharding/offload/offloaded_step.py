"""One bucket's step on the host: its gradients come, it steps, its parameters go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist import _native
from pydist._torch import as_plain_tensors
from pydist.errors import InvalidUsage
from pydist.gpu.late_number import LateNumber
from pydist.sharding.buckets import Bucket
from pydist.sharding.in_flight import Gather
from pydist.sharding.offload.host_shard import HostShard, TakenGradients
from pydist.sharding.offload.side_streams import SideStreams, behind_current
from pydist.sharding.parameter_groups import options_of
from pydist.sharding.sharded_gradient import ShardedGradient
from pydist.sharding.step.bucket_step import BucketStep

_FINISH_FIRST = (
    "call optimizer.finish() on all ranks before parameters are written, or use delayed=False"
)


class OffloadedStep(BucketStep):
    """Takes the place of a bucket's step; its parts are called one after the other.

    `send` and `upload` are for the thread that trains. `run_on_host` may be on another.

    Args:
        bucket: On a GPU, without an optimizer; its segments move to the host.
        param_groups: Of whole parameters.
        make: As for `BucketStep`.
        threads: On which to step.
        streams: Of the bucket's device.
        is_delayed: Whether `run_on_host` may run beside the next backward.
    """

    def __init__(
        self,
        bucket: Bucket,
        param_groups: Sequence[dict[str, Any]],
        make: Callable[[list[dict[str, Any]]], Optimizer],
        threads: _native.StepThreads,
        streams: SideStreams,
        *,
        is_delayed: bool,
    ) -> None:
        self.host = HostShard(bucket, streams, gradient_places=2 if is_delayed else 1)
        super().__init__(bucket, param_groups, make, threads)
        self._streams = streams
        self._is_delayed = is_delayed
        # Whether there are new values on the host.
        self._has_result = False
        # Whether the program has written values before the step, and before the last upload.
        self._is_written: LateNumber | None = None
        self._replaced: LateNumber | None = None
        self._changing: list[Tensor] = []
        self._gradients: list[list[Tensor | None]] = []
        self._taken: TakenGradients | None = None

    def check(self, *, takes_back: bool) -> None:
        """As for `BucketStep`; a result that waits has no place in memory that was replaced."""
        super().check(takes_back=takes_back)
        if self._strays and self._has_result:
            raise InvalidUsage(
                f"parameter {self._strays[0].name} was given other memory while a delayed step was "
                f"under way, which has made new values of it: {_FINISH_FIRST}"
            )

    def run(self, param_groups: Sequence[dict[str, Any]], found_inf: Tensor | None = None) -> None:
        """All parts at once. There is no `found_inf`: the host has decided whether to step."""
        assert found_inf is None
        self.send(param_groups)
        self.run_on_host()
        self.upload()

    def send(self, param_groups: Sequence[dict[str, Any]], *, looks: bool = True) -> None:
        """Starts the copies of gradients that have not begun in backward. Waits for nothing.

        Args:
            param_groups: Of whole parameters, with the options for this step.
            looks: Whether the program may have written parameters since the last upload.
        """
        if self._strays:
            self.host.wait_for_upload()
            self._bring_strays()
        self._changing = self.take_back()
        self.take_options(param_groups)
        self._fix_options()
        segments = self.bucket.segments
        with as_plain_tensors():
            wholes = [segment.member.parameter.grad for segment in segments]
        reduced = [isinstance(whole, ShardedGradient) for whole in wholes]
        self._is_written = self.host.look_for_writes() if looks else None
        self.host.send_gradients(
            [
                None if whole is None or is_reduced else segment.of(whole)
                for segment, whole, is_reduced in zip(segments, wholes, reduced, strict=True)
            ],
            any(reduced),
        )
        places, self._taken = self.host.take_gradients()
        arriving = {
            segment.member.index: None if whole is None else place
            for segment, whole, place in zip(segments, wholes, places, strict=True)
        }
        self._gradients = [[arriving[s.member.index] for s in part.segments] for part in self.parts]

    def _bring_strays(self) -> None:
        """Writes what strays have into their places on the GPU, if nothing else soon does.

        The upload of this step does, but for a delayed one, which leaves them to the next forward.
        """
        if self._is_delayed:
            self.bucket.wait()
            with torch.no_grad():
                for member in self._strays:
                    self.bucket.place(member).copy_(member.parameter.detach())

    def _fix_options(self) -> None:
        """Reads options that are tensors, which a scheduler fills anew while the thread steps."""
        for part in self.parts:
            for name, value in options_of(part.group).items():
                part.group[name] = _fixed(value)

    def run_on_host(self) -> None:
        """Waits for the gradients, and steps."""
        assert self._taken is not None
        scale = self._taken.arrive()
        self.host.wait_for_upload()
        self.require_unwritten()
        if self._is_written is not None and self._is_written.read():
            self.host.fetch_values()
        with torch.no_grad():
            self.update(self._gradients, scale)
        self._gradients, self._taken = [], None
        self._has_result = True

    def require_unwritten(self) -> None:
        """Raises where the last upload has replaced what the program had written. Waits for it."""
        replaced, self._replaced = self._replaced, None
        if replaced is not None and replaced.read():
            raise InvalidUsage(
                f"the program has written parameters of {self.bucket.label} while a delayed step "
                f"was under way, whose values have replaced them: {_FINISH_FIRST}"
            )

    @property
    def has_result(self) -> bool:
        """Whether there are new values that are still to go to the GPU."""
        return self._has_result

    def upload(self) -> None:
        """Starts the copy of the new values to the GPU, behind what has read the old ones."""
        if self._is_delayed:
            self._replaced = self.host.look_for_writes()
        torch.autograd.graph.increment_version(self._changing)
        self._changing = []
        self.send_values()
        self._has_result = False

    def send_values(self) -> torch.Event:
        """Starts the copy alone. Returns what passes when it is over."""
        with behind_current(self._streams.to_device):
            self._uploaded = self.host.upload()
        return self._uploaded

    def sent_gradients(self) -> list[list[Tensor | None]]:
        """What `update` takes, of the gradients that have been sent and not been taken."""
        segments = self.bucket.segments
        there: dict[int, Tensor | None] = {
            s.member.index: place for s, place in zip(segments, self.host.places(), strict=True)
        }
        return [[there[s.member.index] for s in part.segments] for part in self.parts]

    def gather(self, communicator: _native.Communicator) -> None:
        """Starts to bring the other ranks' shards, behind this one's."""
        bucket = self.bucket
        is_plain = all(type(p) is nn.Parameter for p in bucket.parameters)
        if communicator.size > 1 and not bucket.is_own:
            with self._streams.to_device:
                super().gather(communicator)
                if not is_plain:
                    self._uploaded = torch.Event(bucket.memory.device)
                    self._uploaded.record()
        elif is_plain:
            bucket.gather = Gather(bucket.parameters, Upload(self._uploaded))
        if not is_plain:
            self._uploaded.wait()

    def scaling(self, factor: Tensor, present: set[int]) -> contextlib.AbstractContextManager[None]:
        """See `HostShard.scaling`."""
        return self.host.scaling(factor, present, self.bucket)


def _fixed(option: Any) -> Any:
    """An option that nobody changes: numbers where it has tensors of one element."""
    if isinstance(option, Tensor):
        return option.item() if option.numel() == 1 else option.detach().clone()
    return tuple(map(_fixed, option)) if isinstance(option, (list, tuple)) else option


class Upload:
    """A copy to a GPU, as `Gather` takes what brings values.

    Args:
        done: What passes when it is over.
    """

    def __init__(self, done: torch.Event) -> None:
        self._done = done

    def wait(self, timeout: float | None = None) -> None:
        """Lets the current stream wait; with a timeout, the host."""
        self._done.wait() if timeout is None else self._done.synchronize()

    def is_completed(self) -> bool:
        """Whether it is over."""
        return self._done.query()

    def exception(self) -> None:
        """None: what goes wrong in a copy, CUDA tells by itself."""
