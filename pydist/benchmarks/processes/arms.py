"""What can carry a collective: pydist, its roofline, torch's gloo, an MPI. One class for each.

An arm turns a case into a function without arguments that does one call, as its own users would
write it. Arms of torch share one process and one pair of ordinary buffers a rank; an MPI has
processes of its own, which its launcher starts.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pydist
from pydist import _native
from pydist.benchmarks.collective_cases import Buffers, Case
from pydist.errors import InvalidUsage, Timeout
from pydist.job import current
from pydist.topology.placement import placement_of_job

Call = Callable[[], object]

# What one rank writes while another looks, and its neighbours in memory.
_LINE_BYTES = _native.HANDOVER_BYTES
# A few milliseconds of them at most.
_HANDOVERS = 5000

# An idle arm waits for the others: longer than any of them takes.
_PATIENCE = timedelta(days=1)


class Unsupported(Exception):  # noqa: N818
    """An arm has no such thing; nothing was sent."""


class Arm(ABC):
    """One way of carrying collectives, on one rank."""

    # Arms that say the same share one pair of buffers.
    memory = "ordinary"

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._send = self._receive = torch.empty(0, dtype=torch.uint8)

    @property
    @abstractmethod
    def description(self) -> str:
        """What it is, with its version."""

    def reserve(self, size_bytes: int) -> None:
        """Allocates two buffers. Every rank calls it."""
        # Written, so that every page is there.
        self._send = torch.ones(size_bytes, dtype=torch.uint8)
        self._receive = torch.ones(size_bytes, dtype=torch.uint8)

    def share_buffers(self, other: "Arm") -> None:
        """Uses those of another arm."""
        self._send, self._receive = other._send, other._receive

    def buffers(self, case: Case) -> Buffers:
        return Buffers.of(case, self.rank, self._send, self._receive)

    def call(self, case: Case) -> Call:
        """A function that does the case once.

        Raises:
            Unsupported: it can't; the message says why. The same on every rank.
        """
        make = getattr(self, f"_{case.collective}")
        made: Call = make(case, self.buffers(case))
        return made

    @abstractmethod
    def barrier(self) -> None:
        """Returns once every rank has called it."""


class PydistArm(Arm):
    """pydist's own functions, on ordinary tensors."""

    @property
    def description(self) -> str:
        return f"pydist {pydist.__version__} on {current.job.world.backend}"

    def barrier(self) -> None:
        pydist.barrier()

    def _all_reduce(self, case: Case, buffers: Buffers) -> Call:
        if buffers.sent is buffers.received:
            return partial(pydist.all_reduce, buffers.sent, case.op)
        return partial(pydist.all_reduce, buffers.sent, case.op, out=buffers.received)

    def _reduce_scatter(self, case: Case, buffers: Buffers) -> Call:
        return partial(pydist.reduce_scatter, buffers.sent, case.op, out=buffers.received)

    def _all_gather(self, case: Case, buffers: Buffers) -> Call:
        return partial(pydist.all_gather, buffers.sent, out=buffers.received)

    def _broadcast(self, case: Case, buffers: Buffers) -> Call:
        return partial(pydist.broadcast, buffers.sent, case.root)

    def _reduce(self, case: Case, buffers: Buffers) -> Call:
        return partial(pydist.reduce, buffers.sent, case.root, case.op, out=buffers.received)

    def _gather(self, case: Case, buffers: Buffers) -> Call:
        out = buffers.received if self.rank == case.root else None
        return partial(pydist.gather, buffers.sent, case.root, out=out)

    def _scatter(self, case: Case, buffers: Buffers) -> Call:
        sent = buffers.sent if self.rank == case.root else None
        return partial(pydist.scatter, sent, case.root, out=buffers.received)

    def _all_to_all(self, case: Case, buffers: Buffers) -> Call:
        return partial(pydist.all_to_all, buffers.sent, out=buffers.received)

    def _send_recv(self, case: Case, buffers: Buffers) -> Call:
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size

        def exchange() -> None:
            sending = pydist.send(buffers.sent, following, async_op=True)
            pydist.recv(buffers.received, previous)
            sending.wait()

        return exchange

    def _barrier(self, case: Case, buffers: Buffers) -> Call:
        return pydist.barrier


class SymmetricArm(PydistArm):
    """pydist's functions on tensors that all ranks of the host can address."""

    memory = "symmetric"

    @property
    def description(self) -> str:
        return f"{super().description}, on symmetric_empty tensors"

    def reserve(self, size_bytes: int) -> None:
        self._send = pydist.symmetric_empty(size_bytes, dtype=torch.uint8).fill_(1)
        self._receive = pydist.symmetric_empty(size_bytes, dtype=torch.uint8).fill_(1)


class SharedArm(PydistArm):
    """pydist's functions on ordinary tensors that the other ranks of the host can read."""

    memory = "shared"

    @property
    def description(self) -> str:
        return f"{super().description}, on tensors from share_allocations"

    def reserve(self, size_bytes: int) -> None:
        with pydist.share_allocations():
            super().reserve(size_bytes)


class RooflineArm(SymmetricArm):
    """The reads and writes that the collective can't do without; no rank waits for another.

    Where the ranks are on several hosts it is known for all_reduce alone: on each host the ranks
    have to read all their buffers and write all, as they do in one among themselves.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        placement = placement_of_job()
        self._spans_hosts = placement.hosts > 1
        self._group = current.job.world
        if self._spans_hosts:
            self.memory = "symmetric on the host"
            group = pydist.new_group(placement.ranks_on[placement.host_of[rank]])
            assert not isinstance(group, int)  # this rank is in it
            self._group = group

    @property
    def description(self) -> str:
        what = "the same memory traffic without synchronisation"
        return f"{what}, each host by itself" if self._spans_hosts else what

    def reserve(self, size_bytes: int) -> None:
        if not self._spans_hosts:
            super().reserve(size_bytes)
            return
        self._send, self._receive = (
            pydist.symmetric_empty(size_bytes, dtype=torch.uint8, group=self._group).fill_(1)
            for _ in range(2)
        )

    def distances_ns(self) -> list[float]:
        """How far the first host's cores are from each other. Every rank calls it.

        Ranks look without sleeping: each has to have a core of its own.

        Returns:
            Nanoseconds that a cache line takes from the core of rank 0 to that of each other rank
            on its host; on those, to their own. Nothing where that can't be told: on other
            backends than the native one, whose ranks share no memory, or if a rank did not take its
            turns.
        """
        group, size = self._group, self._group.size
        if self._spans_hosts and placement_of_job().host_of[self.rank] != 0:
            return []
        room = pydist.symmetric_empty(_LINE_BYTES * (size + 1), dtype=torch.uint8, group=group)
        skipped = -room.data_ptr() % _LINE_BYTES  # the same on every rank
        lines = room[skipped:][: _LINE_BYTES * size].fill_(0).view(size, _LINE_BYTES)
        distances: list[float] = []
        is_known = True
        for peer in range(1, size):
            pydist.barrier(group=group)
            if group.rank in (0, peer):
                other = peer if group.rank == 0 else 0
                try:
                    distances.append(
                        _native.line_handover_ns(group, lines[peer], other, _HANDOVERS)
                    )
                except (InvalidUsage, Timeout):
                    is_known = False  # and on to the barrier, where the others wait
        pydist.barrier(group=group)
        return distances if is_known else []

    def call(self, case: Case) -> Call:
        kind = "send" if case.collective == "send_recv" else case.collective
        if kind == "barrier":
            raise Unsupported("a barrier has no memory traffic")
        if self._spans_hosts and kind != "all_reduce":
            raise Unsupported("between hosts it is known for all_reduce alone")
        buffers = self.buffers(case)
        op = case.op if case.kind.has_op else "sum"
        try:
            roofline = _native.Roofline(
                self._group, kind, buffers.sent, buffers.received, op, max(case.root, 0)
            )
        except InvalidUsage as error:  # another backend than the native one
            raise Unsupported(str(error)) from error
        return roofline.run


# torch 2.13 has renamed them, and warns of the older names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class GlooArm(Arm):
    """torch.distributed's functions on a gloo group."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)
        self._ops: dict[str, Any] = {
            "sum": dist.ReduceOp.SUM,
            "prod": dist.ReduceOp.PRODUCT,
            "min": dist.ReduceOp.MIN,
            "max": dist.ReduceOp.MAX,
        }

    @property
    def description(self) -> str:
        return f"gloo of torch {torch.__version__}, through torch.distributed"

    def barrier(self) -> None:
        dist.barrier(self._group)

    def _op(self, case: Case) -> Any:
        if case.op not in self._ops:
            raise Unsupported(f"torch's gloo has no reduction {case.op}")
        return self._ops[case.op]

    def _all_reduce(self, case: Case, buffers: Buffers) -> Call:
        if buffers.sent is not buffers.received:
            raise Unsupported("torch.distributed.all_reduce works in place only")
        return partial(dist.all_reduce, buffers.sent, self._op(case), self._group)

    def _reduce_scatter(self, case: Case, buffers: Buffers) -> Call:
        return partial(
            _reduce_scatter_single,
            buffers.received,
            buffers.sent,
            self._op(case),
            self._group,
        )

    def _all_gather(self, case: Case, buffers: Buffers) -> Call:
        return partial(_all_gather_single, buffers.received, buffers.sent, self._group)

    def _broadcast(self, case: Case, buffers: Buffers) -> Call:
        return partial(dist.broadcast, buffers.sent, case.root, self._group)

    def _reduce(self, case: Case, buffers: Buffers) -> Call:
        if buffers.sent is not buffers.received:
            raise Unsupported("torch.distributed.reduce works in place only")
        return partial(dist.reduce, buffers.sent, case.root, self._op(case), self._group)

    def _gather(self, case: Case, buffers: Buffers) -> Call:
        blocks = list(buffers.received.chunk(self.size)) if self.rank == case.root else None
        return partial(dist.gather, buffers.sent, blocks, case.root, self._group)

    def _scatter(self, case: Case, buffers: Buffers) -> Call:
        blocks = list(buffers.sent.chunk(self.size)) if self.rank == case.root else None
        return partial(dist.scatter, buffers.received, blocks, case.root, self._group)

    def _all_to_all(self, case: Case, buffers: Buffers) -> Call:
        return partial(dist.all_to_all_single, buffers.received, buffers.sent, group=self._group)

    def _send_recv(self, case: Case, buffers: Buffers) -> Call:
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size

        def exchange() -> None:
            sending = dist.isend(buffers.sent, following, self._group)
            dist.recv(buffers.received, previous, self._group)
            assert sending is not None
            sending.wait()

        return exchange

    def _barrier(self, case: Case, buffers: Buffers) -> Call:
        return partial(dist.barrier, self._group)


class MpiArm(Arm):
    """mpi4py's functions on numpy views of tensors; the process was started by mpiexec."""

    def __init__(self, site_packages: str) -> None:
        # Last, so that its other packages do not stand in for ours.
        sys.path.append(site_packages)
        from mpi4py import MPI

        self._mpi = MPI
        self._world = MPI.COMM_WORLD
        super().__init__(self._world.Get_rank(), self._world.Get_size())
        self._ops = {"sum": MPI.SUM, "prod": MPI.PROD, "min": MPI.MIN, "max": MPI.MAX}

    @property
    def description(self) -> str:
        version: str = self._mpi.Get_library_version()
        first = version.split(",")[0].split("\n")[0].strip(" \0")
        return " ".join(first.split()) + " through mpi4py"

    def barrier(self) -> None:
        self._world.Barrier()

    def _op(self, case: Case) -> Any:
        if case.op not in self._ops:
            raise Unsupported(f"MPI has no reduction {case.op}")
        return self._ops[case.op]

    def _array(self, tensor: Tensor) -> Any:
        if tensor.dtype in (torch.bfloat16, torch.float16):
            raise Unsupported(f"mpi4py has no type for {tensor.dtype}")
        return tensor.numpy()

    def _send_buffer(self, case: Case, buffers: Buffers) -> Any:
        """What is sent; MPI.IN_PLACE where it lies in the buffer of the result."""
        return self._mpi.IN_PLACE if case.place == "in" else self._array(buffers.sent)

    def _all_reduce(self, case: Case, buffers: Buffers) -> Call:
        return partial(
            self._world.Allreduce,
            self._send_buffer(case, buffers),
            self._array(buffers.received),
            self._op(case),
        )

    def _reduce_scatter(self, case: Case, buffers: Buffers) -> Call:
        if case.place == "in":
            # At the start of the buffer, not at the rank's block.
            raise Unsupported("MPI_Reduce_scatter_block in place leaves its result elsewhere")
        return partial(
            self._world.Reduce_scatter_block,
            self._array(buffers.sent),
            self._array(buffers.received),
            self._op(case),
        )

    def _all_gather(self, case: Case, buffers: Buffers) -> Call:
        return partial(
            self._world.Allgather,
            self._send_buffer(case, buffers),
            self._array(buffers.received),
        )

    def _broadcast(self, case: Case, buffers: Buffers) -> Call:
        return partial(self._world.Bcast, self._array(buffers.sent), case.root)

    def _reduce(self, case: Case, buffers: Buffers) -> Call:
        is_root = self.rank == case.root
        return partial(
            self._world.Reduce,
            self._send_buffer(case, buffers) if is_root else self._array(buffers.sent),
            self._array(buffers.received) if is_root else None,
            self._op(case),
            case.root,
        )

    def _gather(self, case: Case, buffers: Buffers) -> Call:
        is_root = self.rank == case.root
        return partial(
            self._world.Gather,
            self._send_buffer(case, buffers) if is_root else self._array(buffers.sent),
            self._array(buffers.received) if is_root else None,
            case.root,
        )

    def _scatter(self, case: Case, buffers: Buffers) -> Call:
        is_root = self.rank == case.root
        in_place = is_root and case.place == "in"
        return partial(
            self._world.Scatter,
            self._array(buffers.sent) if is_root else None,
            self._mpi.IN_PLACE if in_place else self._array(buffers.received),
            case.root,
        )

    def _all_to_all(self, case: Case, buffers: Buffers) -> Call:
        return partial(
            self._world.Alltoall, self._array(buffers.sent), self._array(buffers.received)
        )

    def _send_recv(self, case: Case, buffers: Buffers) -> Call:
        return partial(
            self._world.Sendrecv,
            self._array(buffers.sent),
            (self.rank + 1) % self.size,
            recvbuf=self._array(buffers.received),
            source=(self.rank - 1) % self.size,
        )

    def _barrier(self, case: Case, buffers: Buffers) -> Call:
        barrier: Call = self._world.Barrier
        return barrier
