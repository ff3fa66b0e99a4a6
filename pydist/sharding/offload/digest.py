"""A digest of a shard on its GPU, by which a step knows whether somebody has written there.

Note [Order counts]: every word is mixed with its own place before all are added. A sum of words, by
whatever weights, would be that of other words as well: of rows that have changed places, where rows
have weights and columns have. The mixing is that of a hash's last rounds (murmur's fmix64, whose
shifts are halves here): one to one, so a single word that changes always changes the sum, and
others, which change several, leave it alone by chance, once in 2^64.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Of a shard, what is mixed at once: all passes after the first find it in the GPU's cache.
PIECE_BYTES = 8 << 20

_WORD_BYTES = 8
# Odd numbers, within int64: the golden ratio's, which keeps places apart, and two of murmur's.
_PLACE = 0x9E3779B97F4A7C15 - (1 << 64)
_MIXERS = (0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64))


def digest_of(shard: Tensor) -> Tensor:
    """A number of 64 bits that changes with the bits of a shard, and with their order.

    Args:
        shard: Of one dimension, in whole lines (csrc/bucketing/shard_layout.h).

    Returns:
        On the shard's device, for which nothing waits.
    """
    total = torch.zeros((), dtype=torch.int64, device=shard.device)
    words = shard.view(torch.int64)
    places: Tensor | None = None
    for piece in words.split(PIECE_BYTES // _WORD_BYTES):
        if places is None:
            places = torch.arange(1, piece.numel() + 1, dtype=torch.int64, device=shard.device)
            places.mul_(_PLACE)
        else:
            places.add_(_advance(places.numel()))
        total.add_(_mixed(piece, places[: piece.numel()]).sum())
    return total


def digest_bytes(shard_bytes: int) -> int:
    """What `digest_of` takes on the GPU while it runs: a piece's words, mixed, and their places."""
    return 2 * min(shard_bytes, PIECE_BYTES)


def _advance(count: int) -> int:
    """What the number of a place grows by over so many words, within int64."""
    grown = count * _PLACE % (1 << 64)
    return grown - (1 << 64) if grown >= 1 << 63 else grown


def _mixed(words: Tensor, places: Tensor) -> Tensor:
    mixed = words ^ places
    # The same memory: a shift of int64 would bring copies of the sign with it.
    halves = mixed.view(torch.int32).view(-1, 2)
    low, high = halves[:, 0], halves[:, 1]
    low.bitwise_xor_(high)
    for mixer in _MIXERS:
        mixed.mul_(mixer)
        low.bitwise_xor_(high)
    return mixed
