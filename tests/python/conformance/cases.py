"""All cases by name, and what the tests call inside the ranks."""

from __future__ import annotations

from collections.abc import Callable

from conformance.collectives import (
    every_dtype_is_moved,
    every_op_on_every_dtype,
    every_size,
    random_sequences,
)
from conformance.groups import groups
from conformance.handles import asynchronous, barriers
from conformance.memory import layouts, numpy_arrays, symmetric_memory
from conformance.messages import messages
from conformance.ragged import ragged_blocks
from conformance.refusals import refusals
from conformance.shared import shared_allocations
from conformance.special_values import special_values
from conformance.suite import GroupFailedError, Report, Suite
from conformance.torch_distributed import torch_collectives
from conformance.wire_types import wire_types

CASES: dict[str, Callable[[Suite], None]] = {
    function.__name__: function
    for function in (
        every_op_on_every_dtype,
        every_size,
        every_dtype_is_moved,
        ragged_blocks,
        layouts,
        symmetric_memory,
        shared_allocations,
        numpy_arrays,
        special_values,
        wire_types,
        messages,
        barriers,
        asynchronous,
        groups,
        refusals,
        random_sequences,
        torch_collectives,
    )
}


def run_cases(name: str) -> Report:
    """Runs on every rank: the cases of CASES[name]."""
    suite = Suite()
    try:
        CASES[name](suite)
    except GroupFailedError:
        suite.report.failures.append(f"the group failed in {suite.name}: no further cases ran")
    return suite.report
