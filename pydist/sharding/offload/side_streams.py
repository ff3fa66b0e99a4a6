"""Streams for copies between a GPU and the host, beside those that compute."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class SideStreams:
    """Of one device: a stream for each direction, as the bus has both at the same time."""

    to_host: torch.Stream
    to_device: torch.Stream

    @staticmethod
    def of(device: torch.device) -> SideStreams:
        """New ones."""
        return SideStreams(torch.Stream(device=device), torch.Stream(device=device))


def behind_current(stream: torch.Stream) -> torch.Stream:
    """Lets a stream wait for what the current stream of its device has been given so far."""
    given = torch.Event(stream.device)
    given.record()
    stream.wait_event(given)
    return stream


def wait_on_host(event: torch.Event) -> None:
    """Waits for an event; where it has passed, nothing counts as a wait."""
    if not event.query():
        event.synchronize()
