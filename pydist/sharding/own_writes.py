"""What a program itself writes into parameters of which all ranks have one copy.

Note [Own pages]: such parameters are views of a mapping that is copy-on-write
(csrc/memory/private_view.h). A program that runs on all ranks does its `p.mul_(0.5)` once on each
of them; in memory that all ranks share, that would multiply as often as there are ranks. So a page
that a rank writes becomes its own, until the next step, where all ranks meet: they compare what
they have written, each takes its shard of that over into the one copy, and all let go of their
pages. That holds whatever writes: torch's functions, `parameter.data`, numpy, kernels of other
libraries. Values that a parameter was given by `parameter.data = tensor` are taken over as well.

Where nobody has written, all that a step does for it is to ask the system which pages are copies:
12 to 50 ns for a page of 4 KiB, which takes 500 ns to read.
"""

from __future__ import annotations

import bisect
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from pydist import _native
from pydist._torch import version_of
from pydist.errors import Error, InvalidUsage, Mismatch
from pydist.job.outcome import outcomes
from pydist.job.rank_names import culprits, name_ranks
from pydist.sharding.buckets import Bucket, Member, kind_of


@dataclass
class _Write:
    """A parameter that has other values on this rank than in the one copy.

    Attributes:
        bucket: Where it is.
        member: It.
        values: What it has, in the order of its place; None if it no longer fits there.
        digest: Of those; not 0.
    """

    bucket: Bucket
    member: Member
    values: Tensor | None
    digest: int


class OwnWrites:
    """Takes over what a program writes into the parameters of an optimizer; see Note [Own pages].

    Args:
        communicator: The ranks.
        buckets: What has a place, as the optimizer adds to it.
        copies: The memory of those, likewise.
    """

    def __init__(
        self,
        communicator: _native.Communicator,
        buckets: Sequence[Bucket],
        copies: Sequence[_native.OneCopy],
    ) -> None:
        self._communicator = communicator
        self._buckets = buckets
        self._copies = copies

    def settle(self) -> None:
        """Takes over what the ranks have written since they last met here. All ranks call it.

        From the call on, until all ranks have met again, nobody reads parameters.

        Raises:
            InvalidUsage: A parameter was given memory of another shape or dtype.
            Mismatch: Ranks have written different values, or not all of them have written. Either
                is raised on every rank, names the parameter, and has changed nothing.
        """
        writes, written = self._written()
        digest = self._digest(writes)
        told = torch.tensor([digest, -digest])
        self._communicator.all_reduce(told, told, "max", label="before parameters are written")
        highest, lowest = told.tolist()
        if highest != -lowest:
            self._refuse(writes)
        _require_fitting(writes)
        for write in writes:
            self._take_over(write)
        self._forget(written)
        # Counts up their versions, so that a backward that has saved one of them notices.
        torch.autograd.graph.increment_version([write.member.parameter for write in writes])

    def described(self) -> str:
        """What this rank has written since all met: names, and a digest of the values, or nothing.

        Talks to nobody. The same on all ranks that have written the same.
        """
        writes, _ = self._written()
        names = ", ".join(write.member.name for write in writes)
        return f"{names} written by the program ({self._digest(writes):x})" if writes else ""

    @contextmanager
    def of_one_rank(self, writer: int, apart: Sequence[tuple[str, Tensor]]) -> Iterator[None]:
        """Lets one rank write for all. All ranks are in it together, and have met before.

        What it writes is its own until the end. If any rank raises inside, nothing of it stays.

        Args:
            writer: The rank.
            apart: Names and parameters of which every rank has one of its own.

        Raises:
            Error: Another rank raised inside.
            InvalidUsage: Another rank than the writer has written, or this one has written what it
                has apart (on every rank, as an Error on the others).
        """
        error: BaseException | None = None
        before = [(version_of(p), p.data_ptr()) for _, p in apart]
        try:
            yield
        except BaseException as raised:
            error = raised
        writes, written = self._written()
        try:
            _require_fitting(writes)
            _require_unwritten(apart, before)
        except InvalidUsage as raised:
            error = error or raised
        rank = self._communicator.rank
        members = self._members()
        changed = {write.member.index for write in writes}
        told = torch.tensor(
            [
                0 if error is None else rank + 1,
                rank + 1 if changed and rank != writer else 0,
                *(int(member.index in changed) for member in members),
            ]
        )
        self._communicator.all_reduce(told, told, "max", label="what one rank has written")
        failed, intruder, *are_written = told.tolist()
        if failed or intruder:
            for write in writes:
                self._put_back(write)
            self._forget(written)
            self._raise(failed - 1, error, intruder - 1, are_written, members)
        for write in writes:
            assert write.values is not None
            _flat(write.bucket.memory, write.member).copy_(write.values)
            self._put_back(write)
        self._communicator.barrier(label="after one rank has written parameters")
        self._forget(written)
        torch.autograd.graph.increment_version(  # as in settle()
            [m.parameter for m, is_one in zip(members, are_written, strict=True) if is_one]
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """All ranks write the same, straight into the one copy, and nobody reads meanwhile.

        So none of them has pages of its own of what is loaded. What was written before is lost.
        """
        for copy in self._copies:
            copy.share(True)
        try:
            yield
        finally:
            for copy in self._copies:
                copy.share(False)

    def _written(self) -> tuple[list[_Write], list[_native.OneCopy]]:
        """The parameters that this rank has changed, and the memory in which it has own pages."""
        found: list[_Write] = []
        pages = _Pages()
        written = []
        for copy in self._copies:
            if ranges := copy.written():
                written.append(copy)
                pages.add(copy.view.data_ptr(), ranges)
        for bucket in self._shared():
            strays = {member.index for member in bucket.strays()}
            if not strays and not pages.touch(bucket.view):
                continue
            for member in bucket.members:
                is_stray = member.index in strays
                values: Tensor | None = _flat(bucket.view, member)
                if is_stray:
                    values = _flat_of_stray(bucket, member)
                elif not pages.touch(_flat(bucket.view, member)):
                    continue
                before = _flat(bucket.memory, member)
                write = _Write(bucket, member, values, 0)
                if values is None or not torch.equal(_bits(values), _bits(before)):
                    write.digest = _digest_of(kind_of(member.parameter), values)
                    found.append(write)
                elif is_stray:
                    self._put_back(write)
        return found, written

    def _digest(self, writes: Sequence[_Write]) -> int:
        """Of the values written; 0 where there are none."""
        if not writes:
            return 0
        # In the order of shared parameters, because the numbers of rank-local ones differ between
        # ranks.
        digests = {write.member.index: write.digest for write in writes}
        return _digest_of([digests.get(member.index) for member in self._members()])

    def _members(self) -> list[Member]:
        members = [member for bucket in self._shared() for member in bucket.members]
        return sorted(members, key=lambda member: member.index)

    def _shared(self) -> list[Bucket]:
        return [bucket for bucket in self._buckets if not bucket.is_own]

    def _take_over(self, write: _Write) -> None:
        """This rank's shard of it; the other ranks take over theirs."""
        assert write.values is not None
        factor = write.member.factor
        for segment in write.bucket.segments:
            if segment.member is write.member:
                own = write.values[segment.begin * factor : segment.end * factor]
                _real(segment.values).copy_(own)
        self._put_back(write)

    def _put_back(self, write: _Write) -> None:
        if write.member.parameter.data_ptr() != write.member.address:
            write.member.parameter.data = write.bucket.place(write.member)

    def _forget(self, written: Sequence[_native.OneCopy]) -> None:
        for copy in written:
            copy.forget()

    def _refuse(self, writes: Sequence[_Write]) -> None:
        """Finds out, with the other ranks, which parameter they have written differently."""
        members = self._members()
        digests = {write.member.index: write.digest for write in writes}
        own = torch.tensor([digests.get(member.index, 0) for member in members])
        rows = own.new_empty(self._communicator.size, len(members))
        self._communicator.all_gather(own, rows, label="which parameters were written")
        odd = next(n for n in range(len(members)) if len(set(rows[:, n].tolist())) > 1)
        found = rows[:, odd].tolist()
        writers = [rank for rank, digest in enumerate(found) if digest]
        how = (
            f"by {name_ranks(writers)} alone"
            if len(writers) < len(found)
            else "with other values on some ranks than on others"
        )
        raise Mismatch(
            f"parameter {members[odd].name} was written {how}, between two steps of "
            "pydist.ShardedOptimizer or before the first, and with share_parameters=True all ranks "
            "have one copy of it: write the same on all ranks, or let one rank write for all, by "
            "`with optimizer.writing() as mine:` and `if mine:` within it",
            **culprits(self._communicator, writers, "wrote otherwise than others"),
        )

    def _raise(
        self,
        failed: int,
        error: BaseException | None,
        intruder: int,
        are_written: Sequence[int],
        members: Sequence[Member],
    ) -> None:
        """What all ranks raise where one has raised inside writing(), or another has written."""
        if failed < 0:
            names = [m.name for m, is_one in zip(members, are_written, strict=True) if is_one]
            raise InvalidUsage(
                f"rank {intruder} has written parameters inside optimizer.writing(), where `mine` "
                f"is False on it; parameters that were written there: {', '.join(names[:3])}"
                f"{' and more' if len(names) > 3 else ''}. Write inside `if mine:` alone; nothing "
                "of it stays"
            ) from error
        everybody = outcomes(self._communicator, "who raised inside optimizer.writing()", error)
        if error is not None:
            raise error
        raise Error(
            f"rank {failed} raised inside optimizer.writing(), and nothing of what was written "
            f"there stays: {everybody[failed].said}",
            **culprits(self._communicator, [failed], everybody[failed].said),
        )


class _Pages:
    """Addresses that this rank has pages of its own at."""

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []

    def add(self, base: int, ranges: Sequence[tuple[int, int]]) -> None:
        """Ranges in order, counted from `base`; no two calls are about the same memory."""
        at = bisect.bisect(self._begins, base)
        self._begins[at:at] = [base + begin for begin, _ in ranges]
        self._ends[at:at] = [base + end for _, end in ranges]

    def touch(self, part: Tensor) -> bool:
        """Whether any of them is in a tensor, which is contiguous."""
        first = bisect.bisect_right(self._ends, part.data_ptr())
        return first < len(self._begins) and self._begins[first] < part.data_ptr() + part.nbytes


def _require_fitting(writes: Sequence[_Write]) -> None:
    for write in writes:
        if write.values is None:
            write.bucket.require_fitting(write.member)


def _require_unwritten(
    apart: Sequence[tuple[str, Tensor]], before: Sequence[tuple[int, int]]
) -> None:
    for (name, parameter), known in zip(apart, before, strict=True):
        if (version_of(parameter), parameter.data_ptr()) != known:
            raise InvalidUsage(
                f"parameter {name}, which was written inside optimizer.writing(), is none of those "
                "that the optimizer trains, so every rank has one of its own: write it on all "
                "ranks, before or after"
            )


def _flat(memory: Tensor, member: Member) -> Tensor:
    """A member's place in the memory of its bucket, as one row of its real dtype."""
    return memory.narrow(0, member.offset, member.parameter.numel() * member.factor)


def _flat_of_stray(bucket: Bucket, member: Member) -> Tensor | None:
    """The values of a parameter that was given other memory, in the order of its place."""
    if kind_of(member.parameter) != kind_of(bucket.place(member)):
        return None
    return _real(member.flat(member.parameter.detach()))


def _real(flat: Tensor) -> Tensor:
    return torch.view_as_real(flat).view(-1) if flat.is_complex() else flat


def _bits(flat: Tensor) -> Tensor:
    return flat.contiguous().view(torch.uint8)


def _digest_of(what: object, values: Tensor | None = None) -> int:
    """62 bits, not all of them 0."""
    digest = hashlib.blake2b(repr(what).encode(), digest_size=7)
    if values is not None:
        digest.update(cast(Any, _bits(values).numpy()))
    return int.from_bytes(digest.digest(), "big") | 1 << 61
