"""Sums of float32 that travel in 16 bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import torch

import pydist
from conformance.references import CHUNK_BYTES, factor_of
from conformance.suite import Suite, check_bits, expect_refusal

WIRE_DTYPES = (torch.float16, torch.bfloat16)
OPS = ("sum", "mean", "premul_sum")
# Within a post and beyond it, and around a chunk of 16-bit elements.
COUNTS = (0, 1, 7, 20, 21, 4099, CHUNK_BYTES // 2, CHUNK_BYTES + 77)


def wire_types(suite: Suite) -> None:
    """What comes out is what a sum of tensors of the wire type gives, as float32."""
    rank, size = suite.rank, suite.size
    communicator = pydist.job.groups.communicator_of()
    factor = factor_of(rank)
    counts = COUNTS[1::2] if suite.is_slow else COUNTS
    for wire, op, count in itertools.product(WIRE_DTYPES, OPS, counts):
        parts = suite.contributions(torch.float32, count, 29)
        expected = suite.expected("all_reduce", op, parts, travels=wire)

        with suite.case("wire type", wire, op, count):
            mine, out = parts[rank].clone(), torch.empty(count)
            communicator.all_reduce(mine, out, op, factor=factor, wire_dtype=wire)
            check_bits(mine, parts[rank], "the input")
            suite.same_everywhere(out)
            if (suite.is_ring and size > 2) or suite.backend == "nccl":
                # Every partial sum is rounded; NCCL's terms after the factor.
                weights = [factor_of(r) if op == "premul_sum" else 1.0 for r in range(size)]
                terms = [weight * part.abs() for weight, part in zip(weights, parts, strict=True)]
                magnitude = torch.stack(terms).abs().sum(0) / (size if op == "mean" else 1)
                off = size * torch.finfo(wire).eps * magnitude + 1e-6
                assert bool(((out - expected).abs() <= off).all())
            else:
                check_bits(out, expected)

        with suite.case("wire type", wire, op, count, "in place"):
            communicator.all_reduce(mine, mine, op, factor=factor, wire_dtype=wire)
            check_bits(mine, out)

        with suite.case("wire type", wire, op, count, "symmetric, asynchronous"):
            memory = pydist.symmetric_empty(count, device=mine.device).copy_(parts[rank])
            work = communicator.all_reduce(
                memory, memory, op, async_op=True, factor=factor, wire_dtype=wire
            )
            work.wait()
            check_bits(memory, out)

    with suite.case("wire type", "a mean whose sum leaves the range"):
        high = torch.full((5,), 32_768.0)  # float16 goes as far as 65504
        communicator.all_reduce(high, high, "mean", wire_dtype=torch.float16)
        check_bits(high, torch.full((5,), 32_768.0))
    with suite.case("wire type", "the tensor's own"):
        wide = torch.full((5,), 257.0)
        communicator.all_reduce(wide, wide, wire_dtype=torch.float32)
        check_bits(wide, torch.full((5,), 257.0 * size))
    tensor = torch.ones(4)
    wrong: dict[str, Callable[[], object]] = {
        "max": lambda: communicator.all_reduce(tensor, tensor, "max", wire_dtype=torch.bfloat16),
        "of float64": lambda: communicator.all_reduce(
            tensor.double(), tensor.double(), wire_dtype=torch.bfloat16
        ),
        "float64": lambda: communicator.all_reduce(tensor, tensor, wire_dtype=torch.float64),
        "complex32": lambda: communicator.all_reduce(tensor, tensor, wire_dtype=torch.complex32),
    }
    for name, call in wrong.items():
        with suite.case("wire type", "refused", name), expect_refusal():
            call()
