"""The link between hosts by itself: what a collective has to send there, without the collective.

The same bytes go from the same ranks to the same ranks of other hosts as docs/network.md says of
the collective (`pydist.benchmarks.link_bytes`), in one `pydist.all_to_all`: all at once, both ways
at the same time, over PYDIST_SOCKETS connections. Nothing is reduced, nothing moves inside a host,
no step waits for the one before. So it is what the link, the system's TCP and the engine's
connections allow together.

Not by `pydist.send` and `pydist.recv`, of which each message waits until its receiver has answered:
a collective announces itself once. Nor by plain sockets, which would need ports of their own let
through between the hosts; bench/hosts/raw_streams.py measures those between network namespaces.
"""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

import pydist
from pydist import _native
from pydist.benchmarks.collective_cases import Case
from pydist.benchmarks.link_bytes import Sent, Settings, sent_between_hosts
from pydist.benchmarks.processes.arms import Arm, Call, Unsupported
from pydist.job import current
from pydist.topology.placement import placement_of_job

__all__ = ["LinkArm", "sent_in_job"]


def sent_in_job(case: Case) -> list[Sent]:
    """What the ranks of the job that this process has joined send between hosts, in a case."""
    environment = _native.read_environment()
    settings = Settings(
        environment.chunk_bytes, environment.one_shot_bytes, environment.algorithm == "ring"
    )
    return sent_between_hosts(case, placement_of_job(), settings)


class LinkArm(Arm):
    """The bytes that a collective has to send between hosts, by one all_to_all."""

    memory = "link"

    @property
    def description(self) -> str:
        return "what the collective has to send between hosts, by one pydist.all_to_all"

    def barrier(self) -> None:
        pydist.barrier()

    def reserve(self, size_bytes: int) -> None:
        # A ring's rank sends up to twice the buffer to the next one.
        super().reserve(2 * size_bytes)

    def call(self, case: Case) -> Call:
        if current.job.world.backend != "native":
            raise Unsupported("what other backends than native send between hosts is not known")
        sent = sent_in_job(case)
        if not sent:
            raise Unsupported("it sends no data between hosts")
        out, into = [0] * self.size, [0] * self.size
        for each in sent:
            if each.sender == self.rank:
                out[each.receiver] = int(each.size_bytes)
            if each.receiver == self.rank:
                into[each.sender] = int(each.size_bytes)
        sources, targets = _blocks(self._send, out), _blocks(self._receive, into)
        return partial(pydist.all_to_all, sources, out=targets)


def _blocks(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Blocks of so many bytes, behind each other, from the beginning again where there is no room.

    Those that lie over each other hold nothing that anybody reads.
    """
    blocks = []
    begin = 0
    for size_bytes in sizes:
        if begin + size_bytes > buffer.numel():
            begin = 0
        blocks.append(buffer[begin : begin + size_bytes])
        begin += size_bytes
    return blocks
