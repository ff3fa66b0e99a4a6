"""What every backend must compute: data, results to the bit, and bounds.

Note [References]
Every rank can compute what any other contributes (`values`), so the expected result is computed
locally, by torch in one process, and compared to the bit:

- integers, bool, and whatever is only moved: exactly, for every backend;
- native: in rank order, 16-bit types in float32 with one rounding, means divided once; beyond one
  shot between hosts of several ranks, host by host (docs/numerics.md);
- two ranks: there is one sum only, since addition commutes. So every backend gives the bits;
- ring and gloo on more ranks, for sums and products of floating-point numbers: the order is
  theirs, so the result lies within `bound` of the one in float64.

Beside that the bits of every reduction are compared between ranks: `Suite.same_everywhere`
carries their digests to the test.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
)
FLOAT8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
)
REDUCED_DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)
DTYPES = (*REDUCED_DTYPES, *FLOAT8)
OPS = ("sum", "mean", "min", "max", "prod", "band", "bor", "bxor", "premul_sum")

# PYDIST_CHUNK_BYTES as it is by default: what native stages at a time.
CHUNK_BYTES = 512 << 10
# What the longest case takes from a pool, and how far into it a case may begin.
_LONGEST_BYTES = 8 * CHUNK_BYTES
_SHIFT = 1 << 12


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_defined(op: str, dtype: torch.dtype) -> bool:
    """Whether docs/backends.md promises `op` on `dtype`."""
    if dtype in FLOAT8:
        return False
    if op in ("sum", "prod"):
        return True
    if op in ("mean", "premul_sum"):
        return dtype in FLOATS or dtype in COMPLEX
    if op in ("min", "max"):
        return dtype not in COMPLEX
    return dtype in INTEGERS or dtype == torch.bool


@functools.cache
def _pool(dtype: torch.dtype, gentle: bool) -> Tensor:
    """Random elements, the same in every process. `gentle`: a product of eight stays in range."""
    with torch.device("cpu"):
        pool = _random_elements(dtype, gentle)
    return pool.to(torch.get_default_device())


def _random_elements(dtype: torch.dtype, gentle: bool) -> Tensor:
    count = _LONGEST_BYTES // dtype.itemsize + 3 * _SHIFT
    generator = torch.Generator().manual_seed(7 * dtype.itemsize + len(name_of(dtype)))
    if dtype in FLOATS or dtype in COMPLEX:
        real = torch.float64
        shape = (count, 2) if dtype in COMPLEX else (count,)
        spread = 1.0 if gentle else 8.0
        exponents = torch.rand(shape, generator=generator, dtype=real) * spread - spread / 2
        signs = torch.randint(0, 2, shape, generator=generator) * 2 - 1
        reals = signs * torch.exp2(exponents)
        return (torch.view_as_complex(reals) if dtype in COMPLEX else reals).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=generator).bool()
    octets = torch.randint(
        0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8
    )
    return octets.view(dtype)


def values(
    dtype: torch.dtype, count: int, rank: int, salt: int = 0, *, gentle: bool = False
) -> Tensor:
    """What `rank` contributes to a case: `count` elements of new memory."""
    start = (rank * 611 + salt * 1013) % _SHIFT
    pool = _pool(dtype, gentle)
    assert start + count <= pool.numel()
    return pool[start : start + count].clone()


def factor_of(rank: int) -> float:
    """Its rank's factor of "premul_sum"; a third is exact in no type."""
    return (rank + 1) / 3.0 * (-1) ** rank


_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _accumulator(part: Tensor) -> Tensor:
    """The numbers that are added up: complex ones as pairs, 16-bit ones widened."""
    if part.is_complex():
        return torch.view_as_real(part)
    return part.float() if part.dtype in (torch.float16, torch.bfloat16) else part


def _from_accumulator(total: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.view_as_complex(total.contiguous()) if dtype in COMPLEX else total.to(dtype)


def _complex_product(a: Tensor, b: Tensor) -> Tensor:
    real = a[..., 0] * b[..., 0] - a[..., 1] * b[..., 1]
    imaginary = a[..., 1] * b[..., 0] + a[..., 0] * b[..., 1]
    return torch.stack((real, imaginary), -1)


def _lesser(a: Tensor, b: Tensor, flip: bool) -> Tensor:
    """The lesser (greater with `flip`), the first of equals, NaN where either is."""
    result = torch.where(b > a if flip else b < a, b, a)
    return torch.where(a != a, a, torch.where(b != b, b, result))


def _combine_integers(op: str, parts: Sequence[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    signed = _SIGNED.get(dtype, dtype)
    # With the highest bit turned, the order of unsigned numbers is that of signed ones.
    turn = torch.iinfo(signed).min if signed != dtype and op in ("min", "max") else 0
    total = parts[0].view(signed) ^ turn
    for part in parts[1:]:
        other = part.view(signed) ^ turn
        if op == "sum":
            total = total + other
        elif op == "prod":
            total = total * other
        elif op in ("min", "max"):
            total = _lesser(total, other, op == "max")
        elif op == "band":
            total = total & other
        elif op == "bor":
            total = total | other
        else:
            total = total ^ other
    return (total ^ turn).view(dtype)


def _combine_bools(op: str, parts: Sequence[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        if op in ("sum", "max", "bor"):
            total = total | part
        elif op in ("prod", "min", "band"):
            total = total & part
        else:
            total = total ^ part
    return total


def combined(op: str, parts: Sequence[Tensor]) -> Tensor:
    """The result as docs/numerics.md promises it for the native backend, to the bit."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        return _combine_bools(op, parts)
    if dtype in INTEGERS:
        return _combine_integers(op, parts)
    terms = [_accumulator(part) for part in parts]
    if op == "premul_sum":
        terms = [term * torch.full_like(term, factor_of(rank)) for rank, term in enumerate(terms)]
    total = _in_order(op, terms, dtype)
    if op == "mean":
        total = total / torch.full_like(total, float(len(parts)))
    return _from_accumulator(total, dtype)


def combined_by_hosts(
    op: str, parts: Sequence[Tensor], hosts: Sequence[int], travels: torch.dtype
) -> Tensor:
    """The same where each host's ranks are combined first, and then the hosts.

    Args:
        hosts: of each rank, numbered by their lowest ranks.
        travels: to which a host's result is rounded, and that of all; the type of what is returned.
    """
    dtype = parts[0].dtype
    if dtype == torch.bool or dtype in INTEGERS:
        return combined(op, parts)  # the same in any order
    # The sum of a host may leave the range of float16 where the mean of all does not.
    is_scaled = op == "mean" and travels == torch.float16
    power = 1 << (len(parts) - 1).bit_length()
    sums = []
    for host in range(max(hosts) + 1):
        terms = []
        for rank, part in enumerate(parts):
            factor = factor_of(rank) if op == "premul_sum" else 1 / power if is_scaled else 1.0
            if hosts[rank] == host:
                terms.append(_accumulator(part) * torch.full_like(_accumulator(part), factor))
        sums.append(_from_accumulator(_in_order(op, terms, dtype), travels))
    total = _in_order(op, [_accumulator(of_host) for of_host in sums], travels)
    if op == "mean":
        divisor = len(parts) / power if is_scaled else float(len(parts))
        total = total / torch.full_like(total, divisor)
    return _from_accumulator(total, travels)


def _in_order(op: str, terms: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Numbers as `_accumulator` gives them for that type, combined one after the other."""
    total = terms[0]
    for term in terms[1:]:
        if op == "prod":
            total = _complex_product(total, term) if dtype in COMPLEX else total * term
        elif op in ("min", "max"):
            total = _lesser(total, term, op == "max")
        else:
            total = total + term
    return total


def bound(
    op: str, parts: Sequence[Tensor], *, rounds_every_step: bool = False
) -> tuple[Tensor, Tensor]:
    """The result in float64, and how far from it one in any order may lie.

    Note [Bound]
    Let u be half the machine epsilon of the type that accumulates: float32 for 16-bit types, unless
    they are rounded at every step, which may then lose half of a subnormal number, too. A
    sum of p terms in any order and association is off by at most g(p-1) times the sum of their
    magnitudes, where g(n) = n u / (1 - n u) (Higham, Accuracy and Stability of Numerical
    Algorithms, 2nd ed., section 4.2). The factors of premul_sum, and the division of a mean, are
    one more rounding each; the factor itself is rounded to the accumulator's type, another. A
    product is off by at most g(p-1) of its magnitude; a complex one, by sqrt(5) u for each
    multiplication (Brent, Percival and Zimmermann, 2007), and we take 3 u. The reference has an
    error of its own, by the same formula with the u of float64. Storing 16 bits adds half a unit
    in the last place, or half of the smallest subnormal number.
    """
    dtype = parts[0].dtype
    size = len(parts)
    wide = torch.float64
    accumulator = _accumulator(parts[0]).dtype
    unit = torch.finfo(dtype if rounds_every_step else accumulator).eps / 2
    unit_of_reference = torch.finfo(wide).eps / 2
    terms = [_accumulator(part).to(wide) for part in parts]
    if op == "prod":
        steps = (3 if dtype in COMPLEX else 1) * (size - 1)
        total = terms[0]
        for term in terms[1:]:
            total = _complex_product(total, term) if dtype in COMPLEX else total * term
        magnitude = total.norm(dim=-1, keepdim=True) if dtype in COMPLEX else total.abs()
        magnitude = magnitude.expand_as(total)
    else:
        if op == "premul_sum":
            terms = [term * factor_of(rank) for rank, term in enumerate(terms)]
        steps = size - 1 + {"premul_sum": 2, "mean": 1}.get(op, 0)
        total = torch.stack(terms).sum(0)
        magnitude = torch.stack(terms).abs().sum(0)
        if op == "mean":
            total, magnitude = total / size, magnitude / size
    off = sum(steps * u / (1 - steps * u) for u in (unit, unit_of_reference)) * magnitude
    if dtype != accumulator and dtype not in COMPLEX:
        half_unit = torch.finfo(dtype).eps / 2
        half_subnormal = torch.finfo(dtype).tiny * half_unit
        off = off + (total.abs() + off) * half_unit
        off = off + half_subnormal * (size if rounds_every_step else 1)
    return total, off
