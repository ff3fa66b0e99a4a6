"""Fingerprints of tensors depend on every bit and its place."""

import pytest
import torch
from torch import Tensor

from pydist.parallel.checks import fingerprints
from pydist.parallel.checks.fingerprints import fingerprints_of

pytestmark = pytest.mark.timeout(60)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def fingerprint(tensor: Tensor) -> int:
    return fingerprints_of([("a", tensor)])["a"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: torch.dtype) -> None:
    zeros = torch.zeros(5).to(dtype)
    found = {fingerprint(zeros)}
    for place in range(5):
        values = torch.zeros(5)
        values[place] = 1
        found.add(fingerprint(values.to(dtype)))
    assert len(found) == 6
    assert fingerprint(torch.empty(0).to(dtype)) == 0
    # A view that begins at an odd element, and one element that has no dimension.
    fingerprint(zeros[1:])
    fingerprint(zeros[2])


def test_opposite_changes_do_not_cancel() -> None:
    for dtype in (torch.int64, torch.int32, torch.int8):
        plain = torch.zeros(4, dtype=dtype)
        assert fingerprint(torch.tensor([0, 1, -1, 0], dtype=dtype)) != fingerprint(plain)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        values = torch.ones(4, dtype=dtype)
        assert fingerprint(values) != fingerprint(values * torch.tensor([1.0, -1.0, -1.0, 1.0]))


def test_rows_that_swap_their_places() -> None:
    table = torch.randn(6, 4, dtype=torch.float64)
    assert fingerprint(table) != fingerprint(table.flip(0))
    assert fingerprint(table) != fingerprint(table.roll(1, dims=1))


@pytest.mark.parametrize("distance", [1, 2, 3])
def test_blocks_that_swap_their_places(distance: int) -> None:
    size = fingerprints._BLOCK_LANES
    blocks = torch.randint(0, 256, (4, size), dtype=torch.uint8)
    order = [0, 1, 2, 3]
    order[0], order[distance] = order[distance], order[0]
    assert fingerprint(blocks) != fingerprint(blocks[order])
    # The last block is not whole.
    longer = torch.cat([blocks.view(-1), torch.ones(3, dtype=torch.uint8)])
    assert fingerprint(longer) != fingerprint(longer.roll(size))


def test_zeros_and_nans_of_other_bits() -> None:
    assert fingerprint(torch.tensor([0.0])) != fingerprint(torch.tensor([-0.0]))
    bits = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32)
    nans = bits.view(torch.float32)
    assert nans.isnan().all()
    assert fingerprint(nans[:1]) != fingerprint(nans[1:])


def test_strides_and_lazy_bits_do_not_count() -> None:
    table = torch.randn(5, 3, dtype=torch.complex64)
    assert fingerprint(table.t().contiguous().t()) == fingerprint(table)
    conjugate = table.conj()
    assert fingerprint(conjugate) == fingerprint(conjugate.resolve_conj())
    assert fingerprint(conjugate.imag) == fingerprint(conjugate.imag.resolve_neg().contiguous())


def test_names_keep_their_order() -> None:
    named = [("b", torch.ones(2)), ("a", torch.zeros(2))]
    assert list(fingerprints_of(named)) == ["b", "a"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_agree() -> None:
    table = torch.randn(1000, 301)
    assert fingerprint(table.cuda()) == fingerprint(table)
