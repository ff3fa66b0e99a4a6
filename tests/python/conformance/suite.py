"""How cases run inside a rank, and how results are compared.

Note [Device]
With CONFORMANCE_DEVICE=cuda, the tensors of all cases are on a CUDA device (staged_gpu), where
torch makes them by default; what a case says of the CPU is then said of the device. With
CONFORMANCE_DEVICE=nccl every rank has a GPU for NCCL. Both are fakes unless there is a real one.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import gpu_ranks
import staged_gpu
import torch
from torch import Tensor

import pydist
from conformance.references import (
    FLOATS,
    INTEGERS,
    bound,
    combined,
    combined_by_hosts,
    name_of,
    values,
)
from pydist import _native

REDUCING_KINDS = ("all_reduce", "reduce_scatter", "reduce")

KINDS = (*REDUCING_KINDS, "all_gather", "broadcast", "gather", "scatter", "all_to_all")


def bits(tensor: Tensor) -> Tensor:
    """The bytes of the elements, in logical order."""
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return dense.view(torch.uint8)


def check_bits(actual: Tensor, expected: Tensor, what: str = "result") -> None:
    """Fails unless both hold the same bits; a NaN is as good as any other NaN."""
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} instead of {expected.dtype}"
    assert actual.numel() == expected.numel(), (
        f"{what}: {actual.numel()} elements instead of {expected.numel()}"
    )
    if torch.equal(bits(actual), bits(expected)):
        return
    if actual.is_complex():
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    ours = actual.contiguous().reshape(-1)
    theirs = expected.contiguous().reshape(-1)
    same = (bits(ours).view(-1, ours.itemsize) == bits(theirs).view(-1, ours.itemsize)).all(1)
    if ours.dtype in FLOATS:
        same |= (ours != ours) & (theirs != theirs)
    wrong = torch.nonzero(~same).flatten()
    if wrong.numel() != 0:
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.numel()} of {same.numel()} elements differ, the first at {first}: "
            f"{ours[first].item()!r} instead of {theirs[first].item()!r}"
        )


def check_bound(
    actual: Tensor,
    op: str,
    parts: Sequence[Tensor],
    what: str = "result",
    *,
    rounds_every_step: bool = False,
) -> None:
    """Fails where `actual` lies further from the exact result than Note [Bound] allows."""
    expected, off = bound(op, parts, rounds_every_step=rounds_every_step)
    ours = torch.view_as_real(actual) if actual.is_complex() else actual
    ours = ours.contiguous().to(torch.float64).reshape(expected.shape)
    distance = (ours - expected).abs()
    wrong = torch.nonzero((~(distance <= off)).flatten()).flatten()
    if wrong.numel() != 0:
        first = int(wrong[0])
        raise AssertionError(
            f"{what}: {wrong.numel()} of {off.numel()} elements are out of bounds, the first at "
            f"{first}: {ours.flatten()[first].item()!r} instead of "
            f"{expected.flatten()[first].item()!r} ± {off.flatten()[first].item():.3g}"
        )


@dataclass
class Report:
    """What one rank saw."""

    rank: int
    cases: int = 0
    failures: list[str] = field(default_factory=list)
    # Digests of results that must have the same bits on every rank.
    digests: dict[str, str] = field(default_factory=dict)


def complaints_of(reports: Sequence[Report]) -> list[str]:
    """A line for each case that failed, or whose result has not the same bits on all ranks."""
    failures = {failure: None for report in reports for failure in report.failures}
    lines = [
        f"ranks {[report.rank for report in reports if failure in report.failures]}: {failure}"
        for failure in failures
    ]
    for case, digest in reports[0].digests.items():
        differing = [r.rank for r in reports if r.digests.get(case, digest) != digest]
        if differing:
            lines.append(f"{case}: ranks {differing} have other bits than rank 0")
    return lines


class GroupFailedError(Exception):
    """The group is of no further use, so no more cases can run."""


def _hosts_of_ranks() -> list[int]:
    """Each rank's host, as the launcher has numbered them."""
    local_rank = torch.tensor([int(os.environ.get("LOCAL_RANK", pydist.rank()))])
    firsts = [first == 0 for first in pydist.all_gather(local_rank).tolist()]
    return [sum(firsts[: rank + 1]) - 1 for rank in range(len(firsts))]


class Suite:
    """The cases of one call on one rank."""

    def __init__(self) -> None:
        # See Note [Device].
        device = os.environ.get("CONFORMANCE_DEVICE")
        self.on_device = device is not None
        if self.on_device:
            if device == "nccl":
                gpu_ranks.install()
            else:
                staged_gpu.install()
            torch.set_default_device("cuda")
        pydist.init(timeout=30)
        torch.set_num_threads(1)
        self.rank = pydist.rank()
        self.size = pydist.world_size()
        self.backend = pydist.backend()
        self.hosts = _hosts_of_ranks()
        # wait() is then for what follows on the stream, and the host learns of the end later.
        self.waits_on_stream = self.backend == "nccl"
        self.is_ring = os.environ.get("PYDIST_ALGORITHM") == "ring"
        # Each collective of gloo's takes milliseconds here: grids are thinned out.
        self.is_slow = self.on_device or (self.backend == "gloo" and self.size > 4)
        self.report = Report(self.rank)
        self.name = ""

    @contextlib.contextmanager
    def case(self, *name: object) -> Iterator[None]:
        """Runs the body as a case: notes its failure under its name and goes on."""
        self.name = "/".join(
            name_of(part) if isinstance(part, torch.dtype) else str(part) for part in name
        )
        self.report.cases += 1
        try:
            yield
        except pydist.InvalidUsage as error:
            self._note(error)
        except pydist.Error as error:
            # Anything but a refusal leaves the ranks out of step.
            self._note(error)
            raise GroupFailedError from error
        except Exception as error:
            self._note(error)

    def _note(self, error: Exception) -> None:
        where = traceback.extract_tb(error.__traceback__)[1:2]
        line = f" (line {where[0].lineno})" if where else ""
        self.report.failures.append(f"{self.name}{line}: {type(error).__name__}: {error}")

    def is_exact(self, kind: str, op: str, dtype: torch.dtype, size: int | None = None) -> bool:
        """Whether the bits of a reduction are promised; see Note [References]."""
        if (self.size if size is None else size) <= 2 or dtype in INTEGERS or dtype == torch.bool:
            return True
        if self.backend == "gloo":
            return op not in ("sum", "mean", "premul_sum")
        orders = ("sum", "mean", "premul_sum", "prod")
        if self.backend == "nccl":
            return op not in orders
        return not (self.is_ring and kind in ("all_reduce", "reduce_scatter") and op in orders)

    def expected(
        self, kind: str, op: str, parts: Sequence[Tensor], travels: torch.dtype | None = None
    ) -> Tensor:
        """The bits of a reduction of `parts`, which elements of the type `travels` may carry."""
        dtype = travels or parts[0].dtype
        if self._goes_by_hosts(kind, parts, dtype):
            return combined_by_hosts(op, parts, self.hosts, dtype).to(parts[0].dtype)
        return combined(op, [part.to(dtype) for part in parts]).to(parts[0].dtype)

    def _goes_by_hosts(self, kind: str, parts: Sequence[Tensor], dtype: torch.dtype) -> bool:
        """docs/network.md, "Which way data goes"."""
        hosts = max(self.hosts) + 1
        if self.backend != "native" or hosts in (1, self.size) or len(parts) <= 2:
            return False
        blocks = self.size if kind == "reduce_scatter" else 1
        environment = _native.read_environment()
        limit = _native.sent_ahead_limit(
            kind, len(parts), environment.chunk_bytes, environment.one_shot_bytes
        )
        is_one_shot = blocks * parts[0].numel() * dtype.itemsize <= limit
        assert is_one_shot or len(parts) == self.size, "where the ranks of a sub-group are"
        return not is_one_shot

    def rounds_every_step(self, op: str, dtype: torch.dtype) -> bool:
        """Whether NCCL rounds 16-bit types whenever it combines two; see docs/numerics.md."""
        if self.backend != "nccl" or self.is_ring:
            return False
        ops = {torch.float16: ("sum", "prod"), torch.bfloat16: ("sum", "mean", "prod")}
        return op in ops.get(dtype, ())

    def check_reduced(
        self, actual: Tensor, kind: str, op: str, parts: Sequence[Tensor], what: str = "result"
    ) -> None:
        """Fails unless `actual` is what the backend promises for the contributions `parts`."""
        if self.is_exact(kind, op, parts[0].dtype, len(parts)):
            check_bits(actual, self.expected(kind, op, parts), what)
        else:
            check_bound(
                actual,
                op,
                parts,
                what,
                rounds_every_step=self.rounds_every_step(op, parts[0].dtype),
            )

    def same_everywhere(self, result: Tensor, what: str = "") -> None:
        """Notes a result whose bits the test compares between ranks."""
        digest = hashlib.blake2b(bits(result).cpu().numpy().tobytes(), digest_size=8).hexdigest()
        assert self.report.digests.setdefault(f"{self.name}{what}", digest) == digest

    def contributions(
        self, dtype: torch.dtype, count: int, salt: int = 0, *, op: str = "sum"
    ) -> list[Tensor]:
        """What each rank contributes, in rank order."""
        gentle = op == "prod"
        return [values(dtype, count, rank, salt, gentle=gentle) for rank in range(self.size)]


@contextlib.contextmanager
def expect_refusal(mentioning: str = "") -> Iterator[None]:
    """Fails unless the body raises InvalidUsage, with `mentioning` in its message."""
    try:
        yield
    except pydist.InvalidUsage as error:
        if mentioning not in str(error):
            raise AssertionError(f"the refusal does not name {mentioning!r}: {error}") from error
        return
    raise AssertionError("it was not refused")
