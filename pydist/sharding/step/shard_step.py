"""The step of a rank's whole shard, bucket by bucket, and when what it has updated has arrived.

How the ranks get each other's shards decides between three ways: they travel, from where the
parameters are (`BucketStep`) or from the host (`Offload`); or all ranks map one copy, which each
writes its shard into.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import Optimizer

from pydist import _native
from pydist.errors import InvalidUsage
from pydist.sharding.buckets import Bucket
from pydist.sharding.offload.offload import Offload
from pydist.sharding.own_writes import OwnWrites
from pydist.sharding.placement import ShardedLayout
from pydist.sharding.state.ranges import ParameterState
from pydist.sharding.state.segment_states import take_over
from pydist.sharding.step.bucket_step import BucketStep
from pydist.sharding.step.joint_step import JointStep
from pydist.sharding.step.scaled_step import LeftOutStep, ScaledStep


class ShardStep:
    """Updates this rank's shard.

    Args:
        communicator: The ranks.
        layout: Where the shard is.
        joint: What the ranks tell each other.
        make: Makes an optimizer of the wrapped class, of the groups that it is given.
        waiting: The state of parameters that have no place yet, by number; they take it along.
        writes: What takes over what the program writes into the one copy of the parameters; None:
            every rank has its own.
        offload: The steps on the host, if they are taken there.

    Attributes:
        steps: Those of the buckets.
    """

    def __init__(
        self,
        communicator: _native.Communicator,
        layout: ShardedLayout,
        joint: JointStep,
        make: Callable[[list[dict[str, Any]]], Optimizer],
        waiting: dict[int, ParameterState],
        writes: OwnWrites | None,
        offload: Offload | None,
    ) -> None:
        self.steps: list[BucketStep] = []
        self._communicator = communicator
        self._layout = layout
        self._joint = joint
        self._make = make
        self._waiting = waiting
        self._writes = writes
        self._offload = offload
        self._left_out = LeftOutStep()

    def place(self, entering: list[int], param_groups: Sequence[dict[str, Any]]) -> None:
        """Gives parameters their places, and makes these ready to step. All ranks call it.

        Args:
            entering: The numbers of the parameters.
            param_groups: All groups, of whole parameters.
        """
        with self._joint.giving_up_for_all("placing parameters"):
            self._take_up(self._layout.place(entering), param_groups)

    def refuse_capture(self) -> None:
        """A graph would repeat neither what the host counts nor the wait for what travels."""
        devices = {bucket.memory.device for bucket in self._layout.buckets}
        if any(_native.is_capturing(device) for device in devices):
            raise InvalidUsage(
                "ShardedOptimizer.step() cannot be captured into a CUDA graph: leave it, and the "
                "backward of its gradients, outside of the capture"
            )

    def check(self) -> None:
        """Raises where `run` can't be called; see `BucketStep.check`."""
        for step in self.steps:
            step.check(takes_back=self._writes is None or step.bucket.is_own)

    def run(self, param_groups: Sequence[dict[str, Any]], scaled: ScaledStep) -> None:
        """Steps once, after all ranks' `check`, and starts gathering. All ranks call it.

        Args:
            param_groups: Of whole parameters, with the options for this step.
            scaled: What a scaler has given for it.
        """
        with self._joint.giving_up_for_all("step()"):
            known = len(self.steps)
            self._take_up(self._layout.adopt_buckets(), param_groups)
            for step in self.steps[known:]:
                step.check(takes_back=False)
        if self._writes is not None:
            self._writes.settle()
        with self._joint.giving_up_for_all("step()"):
            scaled.unscale()
            if self._writes is not None:
                # What all ranks read: none reads it any more, and none does before it is whole.
                for step in self.steps:
                    step.run(param_groups)
                self._communicator.barrier(label="after parameters were written")
            elif self._offload is not None:
                self._offload.step(param_groups)
            else:
                # In reverse, because forward needs first what backward completes last.
                for step in reversed(self.steps):
                    step.run(param_groups, scaled.found_inf)
                    step.gather(self._communicator)
                self._left_out.expect(scaled.found_inf, self.steps)

    def join(self) -> None:
        """Waits until the last step is over on the host: one that it takes, and what it counts.

        What a delayed step has raised, the other ranks hear as well.
        """
        self._left_out.settle()
        if self._offload is not None:
            with self._joint.giving_up_for_all("the delayed step"):
                self._offload.join()

    def arrive(self) -> None:
        """Waits until the other ranks' shards have arrived, but for those of a delayed step."""
        for bucket in self._layout.buckets:
            bucket.wait()

    def finish(self) -> None:
        """Takes over a delayed step, and waits until all has arrived. All ranks call it."""
        if self._offload is not None:
            self.join()
            # What is still gathered lands where the values of the delayed step go next.
            self.arrive()
            with self._joint.giving_up_for_all("taking over a delayed step"):
                self._offload.take_over()
        self.arrive()

    def forget_states(self) -> None:
        """The state was replaced."""
        for step in self.steps:
            step.forget_states()

    def _take_up(self, new: list[Bucket], param_groups: Sequence[dict[str, Any]]) -> None:
        """Makes new buckets ready to step."""
        for bucket in new:
            made = BucketStep if self._offload is None else self._offload.make_step
            self.steps.append(made(bucket, param_groups, self._make))
        take_over(self._waiting, new)
        for member in (member for bucket in new for member in bucket.members):
            self._waiting.pop(member.index, None)
