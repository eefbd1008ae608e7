"""Which sequence stands at which position of the endless order that training follows.

The sequences are visited in an order that is a permutation of all N, then another permutation,
and so on. What stands at position ``p`` is the same whatever the number of ranks, so a run can be
continued on any number of them::

    position   0 1 2 3 | 4 5 6 7 | ...      batch_size 4
    rank 0     0 1     | 4 5     |          2 ranks
    rank 1         2 3 |     6 7 |
"""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

SORTED = 1 << 20
"""Sequences up to which an epoch's order is made by sorting; beyond, no array of all is made."""
_ROUNDS = 6


def visiting_order(first: int, number: int, count: int, seed: int) -> NDArray[np.int64]:
    """Return which sequences are at positions ``first`` to ``first + number - 1``.

    Args:
        first: Position of the first, at least 0.
        number: How many.
        count: N, sequences there are. Every run of N positions from a multiple of N on visits
            each sequence once.
        seed: Decides the permutations.
    """
    epochs = range(first // count, (first + max(1, number) - 1) // count + 1)
    parts = []
    for epoch in epochs:
        start = max(first - epoch * count, 0)
        stop = min(first + number - epoch * count, count)
        if count <= SORTED:
            parts.append(_permutation(epoch, count, seed)[start:stop])
        else:
            parts.append(permute(np.arange(start, stop), count, epoch, seed))
    return np.concatenate(parts)


@lru_cache(maxsize=64)  # at most 8 MiB each; a mixture asks for those of all its sources
def _permutation(epoch: int, count: int, seed: int) -> NDArray[np.int64]:
    """Sort the numbers by a hash of each, which stays the same for ever.

    Random generators of libraries do not promise that, and a run is continued for weeks.
    """
    key = np.arange(count, dtype=np.uint64) + np.uint64((epoch << 40) % 2**64)
    for salt in (seed, 0):
        key = _hash(key, salt)
    return np.argsort(key, kind="stable")


def _hash(key: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """Scramble 64 bits, as splitmix64 does."""
    key = (key ^ np.uint64(salt % 2**64)) + np.uint64(0x9E3779B97F4A7C15)
    key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return key ^ (key >> np.uint64(31))


def permute(positions: NDArray[np.int64], count: int, epoch: int, seed: int) -> NDArray[np.int64]:
    """Return what a permutation of ``0..count-1`` has at some positions, and look at no others.

    A Feistel network permutes ``0..4^h-1``, the smallest such range that holds ``count``. What it
    sends out of ``0..count-1`` is sent on until it comes back: that again is a permutation. A
    position takes fewer than four rounds of this on average.
    """
    half = np.uint64(max(1, ((count - 1).bit_length() + 1) // 2))
    low = np.uint64((1 << int(half)) - 1)
    key = np.asarray([epoch, seed % 2**64], dtype=np.uint64)
    salts = [int(_hash(_hash(key[:1], 0) ^ key[1:], i)[0]) for i in range(_ROUNDS)]

    def scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x >> half, x & low
        for salt in salts:
            left, right = right, left ^ (_hash(right, salt) & low)
        return left << half | right

    found = scramble(positions.astype(np.uint64))
    while (out := found >= np.uint64(count)).any():
        found[out] = scramble(found[out])
    return found.astype(np.int64)


def rank_share(numbers: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """Return the part of rank ``rank`` of ``size``: consecutive, differing by at most one."""
    each, rest = divmod(len(numbers), size)
    start = rank * each + min(rank, rest)
    return numbers[start : start + each + (rank < rest)]
