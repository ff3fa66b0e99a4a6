"""Fingerprints of tensors: integers that differ, almost surely, where any bit does.

Note [Fingerprints]
A tensor's bits are taken as a sequence of lanes, integers of 8, 16 or 32 bits, in the order of its
elements. Lane i counts `key(i)` times, an odd pseudo-random number of 64 bits, in arithmetic modulo
2^64: the multilinear hash of Carter and Wegman ("Universal classes of hash functions", 1979) in the
form for words of Lemire and Kaser ("Strongly universal string hashing is fast", 2014). So a plain
sum's blindness is gone: lanes that swap their places, and lanes that change by opposite amounts,
change it. One lane alone that changes always does, as its key is odd. Others escape with a chance
of about 2^-32: a lane has 32 bits at most, so its change has at most 31 zeros at its end, and 33
bits of every product stay random. (With lanes of 64 bits, two flipped signs would cancel.)

There are keys for one block of lanes. Blocks follow each other as the digits of a polynomial in an
odd number, so that work memory is a block's, whatever the size of the tensor.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}

_BLOCK_LANES = 1 << 18

# The base of the polynomial. As it is 3 modulo 8, its powers differ in their lowest bits.
_BASE = 0x5851F42D4C957F2B


def fingerprints_of(named: list[tuple[str, Tensor]]) -> dict[str, int]:
    """A fingerprint of every tensor's bits, in their order: 0 if it has no elements.

    Equal on all devices, whatever the strides. The shape does not count.
    """
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    with torch.no_grad():
        for name, each in named:
            by_device.setdefault(each.device, []).append((name, _fingerprint(each)))
        values: dict[str, int] = {}
        # The host waits once for each device.
        for on_device in by_device.values():
            numbers = torch.stack([number for _, number in on_device]).tolist()
            values |= dict(zip((name for name, _ in on_device), numbers, strict=True))
    return {name: values[name] for name, _ in named}


def _fingerprint(tensor: Tensor) -> Tensor:
    """The fingerprint of one tensor, as a tensor of one int64 beside it."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    if plain.is_complex():
        plain = torch.view_as_real(plain)
    lanes = plain.contiguous().view(-1).view(_LANES[plain.element_size()])
    keys = _keys(lanes.device)
    products = torch.empty(min(_BLOCK_LANES, lanes.numel()), dtype=torch.int64, device=lanes.device)
    total = torch.zeros((), dtype=torch.int64, device=lanes.device)
    for block in lanes.split(_BLOCK_LANES):
        count = block.numel()
        torch.mul(block, keys[:count], out=products[:count])
        total = total * _BASE + products[:count].sum()
    return total


@functools.cache
def _keys(device: torch.device) -> Tensor:
    """One odd number for each lane of a block: what SplitMix64 gives, with the lowest bit set."""
    state = torch.arange(1, _BLOCK_LANES + 1, dtype=torch.int64) * _signed(0x9E3779B97F4A7C15)
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return ((state ^ _shifted(state, 31)) | 1).to(device)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Words of 64 bits, shifted to the right with zeros from the left, whatever their signs."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """The int64 that has a word's bits."""
    return word - (1 << 64) if word >> 63 else word
