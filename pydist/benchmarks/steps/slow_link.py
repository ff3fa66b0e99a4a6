"""A link that carries one bucket at a time at a given bandwidth, and the best step it allows.

It is simulated by a communication hook: a thread sleeps until the bucket would be there, so that
the core is left to backward as with a network card. What arrives is the bucket itself, which is the
mean where all ranks have the same samples. What a step did is read from its trace
(PYDIST_TIMELINE).
"""

import json
import queue
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class _Transfer:
    tensor: Tensor
    ends_at_s: float
    future: torch.futures.Future[Tensor]


class Link:
    """One transfer at a time, at a bandwidth, in the order of sending."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0
        self._sent: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._deliver, name="link", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """A thread that is within torch when the process ends would abort it."""
        self._sent.put(None)
        self._thread.join()

    def send(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        # The end is settled here, so that a sleep that lasts too long does not delay the next one.
        self._free_at_s = max(self._free_at_s, time.monotonic())
        self._free_at_s += tensor.nbytes / self._bytes_per_s
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        self._sent.put(_Transfer(tensor, self._free_at_s, future))
        return future

    def _deliver(self) -> None:
        while (transfer := self._sent.get()) is not None:
            time.sleep(max(0.0, transfer.ends_at_s - time.monotonic()))
            transfer.future.set_result(transfer.tensor)


def send(link: Link, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook."""
    return link.send(bucket.buffer())


@dataclass
class Bucket:
    """Of one round. Seconds on the clock that all ranks share."""

    first_parameter: str = ""
    size_bytes: int = 0
    ready_s: float = 0.0
    launched_s: float = 0.0
    done_s: float = 0.0


@dataclass
class Round:
    """One step of one rank."""

    began_s: float = 0.0
    computed_s: float = 0.0
    ended_s: float = 0.0
    buckets: dict[int, Bucket] = field(default_factory=dict)

    def ideal_end_s(self, bytes_per_s: float) -> float:
        """When it would end if buckets set out as soon as they are ready and the link is free."""
        free_at_s = self.began_s
        for bucket in sorted(self.buckets.values(), key=lambda bucket: bucket.ready_s):
            free_at_s = max(free_at_s, bucket.ready_s) + bucket.size_bytes / bytes_per_s
        return max(free_at_s, self.computed_s)


def read_trace(path: Path) -> list[Round]:
    """The rounds of one rank, from what PYDIST_TIMELINE had it write."""
    rounds: dict[int, Round] = {}
    for event in json.loads(path.read_text()):
        if event["ph"] == "M":
            continue
        at_s = event["ts"] * 1e-6
        if event["ph"] == "X":
            this = rounds.setdefault(event["args"]["round"], Round())
            if event["name"] == "backward":
                this.began_s, this.computed_s = at_s, at_s + event["dur"] * 1e-6
            elif event["name"] == "wait for averages":
                this.ended_s = at_s + event["dur"] * 1e-6
            continue
        of_round, number = (int(word) for word in event["id"].split()[-2:])
        bucket = rounds.setdefault(of_round, Round()).buckets.setdefault(number, Bucket())
        is_begin = event["ph"] == "b"
        if event["cat"] == "on its way":
            if is_begin:
                bucket.first_parameter = event["name"].partition("first parameter ")[2]
                bucket.size_bytes = event["args"]["bytes"]
                bucket.launched_s = at_s
                # One that was incomplete to the end has no other.
                bucket.ready_s = bucket.ready_s or at_s
            else:
                bucket.done_s = at_s
        elif is_begin:
            bucket.ready_s = at_s
    return [this for _, this in sorted(rounds.items())]
