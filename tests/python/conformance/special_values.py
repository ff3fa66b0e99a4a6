"""NaN, infinities, signed zeros, overflow and wrap-around."""

from __future__ import annotations

import torch

import pydist
from conformance.references import FLOATS, INTEGERS, combined
from conformance.suite import Suite, check_bits


def special_values(suite: Suite) -> None:
    """NaN, infinities, zeros of both signs, overflow and subnormal numbers."""
    rank, size = suite.rank, suite.size
    inf, nan = float("inf"), float("nan")
    for dtype in FLOATS:
        huge, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
        columns = {
            "NaN on the first": [nan] + [1.0] * (size - 1),
            "NaN on the last": [1.0] * (size - 1) + [nan],
            "NaN on one in the middle": [nan if r == size // 2 else -3.0 for r in range(size)],
            "NaN everywhere": [nan] * size,
            "infinity": [inf if r == size - 1 else 2.0 for r in range(size)],
            "opposite infinities": [inf if r % 2 else -inf for r in range(size)],
            "overflow": [huge] * size,
            "subnormal": [tiny / 4 * (r + 1) for r in range(size)],
            "minus zero": [-0.0] * size,
            "zeros": [0.0 if r % 2 else -0.0 for r in range(size)],
        }
        table = torch.tensor(list(columns.values()), dtype=torch.float64).to(dtype)
        # Long enough for the kernels' vectors, and in every lane.
        parts = [table[:, r].repeat_interleave(67) for r in range(size)]
        names = list(columns)
        for op in ("sum", "mean", "min", "max", "prod"):
            tensor = parts[rank].clone()
            with suite.case("special values", dtype, op):
                pydist.all_reduce(tensor, op)
                suite.same_everywhere(tensor)
            expected = combined(op, parts)
            for row, column in enumerate(names):
                with suite.case("special values", dtype, op, column):
                    ours = tensor[67 * row : 67 * (row + 1)]
                    theirs = expected[67 * row : 67 * (row + 1)]
                    in_any_order = op in ("min", "max") and column == "zeros" and suite.is_ring
                    if in_any_order:
                        assert (ours == 0).all()
                    elif suite.is_exact("all_reduce", op, dtype) or column != "subnormal":
                        check_bits(ours, theirs)
                    else:
                        # Exact in any order as long as nothing is rounded: quarters of tiny.
                        assert torch.allclose(ours, theirs, rtol=1e-2, atol=0.0)
    if size <= 2 or not suite.rounds_every_step("sum", torch.bfloat16):
        _check_sums_in_float32(suite)
    for dtype in INTEGERS:
        info = torch.iinfo(dtype)
        for op, value in (("sum", info.max), ("min", info.min), ("max", info.max), ("prod", 3)):
            with suite.case("special values", dtype, op, value):
                parts = [torch.tensor([value] * 5, dtype=dtype)] * size
                tensor = parts[rank].clone()
                pydist.all_reduce(tensor, op)
                check_bits(tensor, combined(op, parts))


def _check_sums_in_float32(suite: Suite) -> None:
    """16-bit types that are not rounded before their sum is complete."""
    rank, size = suite.rank, suite.size
    with suite.case("special values", "float16 sums past its range in float32"):
        # 40000 + 40000 is beyond float16, but the sum is not rounded before it is complete.
        sign = [1.0, 1.0, -1.0, -1.0]
        parts = [torch.full((9,), 40000.0 * sign[r % 4], dtype=torch.float16) for r in range(size)]
        tensor = parts[rank].clone()
        pydist.all_reduce(tensor)
        check_bits(tensor, combined("sum", parts))
        if size % 4 == 0:
            assert not tensor.any()
    with suite.case("special values", "bfloat16 sums are rounded once"):
        # Each 1 is lost to bfloat16 beside 256, not to float32.
        parts = [torch.full((33,), 256.0 if r == 0 else 1.0) for r in range(size)]
        tensor = parts[rank].bfloat16()
        pydist.all_reduce(tensor)
        check_bits(tensor, torch.full((33,), 255.0 + size).bfloat16())
