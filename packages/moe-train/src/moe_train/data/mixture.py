"""Several sources in one order: each position belongs to one source, by the weights.

Which source a position belongs to is a function of the position alone, periodic, and as even as can
be: of the first p positions a source with the fraction f of the weight has f * p, to less than one
sequence, and of any window less than two. Within its own positions a source is visited as if it
were alone, epoch after epoch::

    weights 3 : 1      source    a b a a | a b a a | ...
                       its nth   0 0 1 2   3 1 4 5
"""

from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from hashlib import sha256
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from moe_train.corpus import CorpusError
from moe_train.data.batch import Batch
from moe_train.data.sequences import SequenceSource

FINEST = 100_000
"""Positions of the longest period. Weights that need a longer one are rounded to this fraction."""


class Period(NamedTuple):
    """Which source each position of a period belongs to.

    Attributes:
        source: int64, the number of the source.
        nth: int64, how many positions before it, in the period, belong to the same.
        counts: Positions of each source.
    """

    source: NDArray[np.int64]
    nth: NDArray[np.int64]
    counts: tuple[int, ...]


class Mixture:
    """Sequences of several sources, mixed by weights.

    Args:
        sources: By name. A name decides the order within its source, with the seed.
        weights: Positive, by name; only their ratios count.

    Raises:
        CorpusError: If a weight is too small to be given a position.
    """

    def __init__(self, sources: Mapping[str, SequenceSource], weights: Mapping[str, Fraction]):
        self.names, self.sources = tuple(sources), tuple(sources.values())
        self.period = make_period(_counts({name: weights[name] for name in self.names}))
        self._first = np.cumsum([0, *(source.count for source in self.sources)])
        self.count = int(self._first[-1])

    @property
    def fractions(self) -> dict[str, float]:
        """The fraction of all positions that each source has."""
        total = sum(self.period.counts)
        return {n: c / total for n, c in zip(self.names, self.period.counts, strict=True)}

    def order(self, first: int, number: int, seed: int) -> NDArray[np.int64]:
        """Return which sequences are at positions ``first`` to ``first + number - 1``."""
        periods, at = np.divmod(np.arange(first, first + number), len(self.period.source))
        source = self.period.source[at]
        nth = periods * np.asarray(self.period.counts)[source] + self.period.nth[at]
        numbers = np.empty(number, np.int64)
        for i, one in enumerate(self.sources):
            mine = np.flatnonzero(source == i)
            if len(mine):
                salt = int.from_bytes(sha256(self.names[i].encode()).digest()[:8], "little")
                found = one.order(int(nth[mine[0]]), len(mine), (seed + salt) % 2**64)
                numbers[mine] = self._first[i] + found
        return numbers

    def batch(self, numbers: NDArray[np.int64], device: torch.device | None = None) -> Batch:
        """Return the sequences of these numbers, each in ``0..count-1``."""
        source = self._source(numbers)
        order = np.argsort(source, kind="stable")
        batches = []
        for i in range(len(self.sources)):
            mine = order[source[order] == i]
            if len(mine) or (i == 0 and not len(numbers)):
                batches.append(self.sources[i].batch(numbers[mine] - self._first[i]))
        batch = Batch.joined(batches).taken(np.argsort(order, kind="stable"))
        return batch if device is None else batch.to(device)

    def num_tokens(self, numbers: NDArray[np.int64]) -> int:
        """Return how many real tokens the sequences of these numbers have."""
        source = self._source(numbers)
        return sum(
            one.num_tokens(numbers[source == i] - self._first[i])
            for i, one in enumerate(self.sources)
        )

    def _source(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.searchsorted(self._first, numbers, side="right") - 1

    def spread(self, number: int) -> NDArray[np.int64]:
        """Return up to ``number`` sequence numbers, spread over each source by its weight."""
        share = self.fractions
        parts = [
            self._first[i] + source.spread(max(1, round(number * share[name])))
            for i, (name, source) in enumerate(zip(self.names, self.sources, strict=True))
        ]
        return np.concatenate(parts)


def _counts(weights: Mapping[str, Fraction]) -> tuple[int, ...]:
    """Return how many positions of a period each weight gets."""
    total = sum(weights.values())
    parts = {name: weight / total for name, weight in weights.items()}
    length = min(lcm(*(part.denominator for part in parts.values())), FINEST)
    counts = {name: int(part * length) for name, part in parts.items()}
    # What rounding down has left goes to those that lost most.
    lost = sorted(parts, key=lambda name: counts[name] - parts[name] * length)
    for name in lost[: length - sum(counts.values())]:
        counts[name] += 1
    for name, count in counts.items():
        if not count:
            raise CorpusError(
                f"the weight of {name} is {float(parts[name]):.3g} of the sum; less than "
                f"{1 / FINEST} is never seen"
            )
    return tuple(counts.values())


@lru_cache(maxsize=8)
def make_period(counts: tuple[int, ...]) -> Period:
    """Give each position of a period a source, so that none is ever a whole one behind or ahead.

    Tijdeman's rule (The chairman assignment problem, 1980): among the sources that have waited
    long enough for one more position, the one that must have it soonest. With n sources, no
    source is then off by more than 1 - 1 / (2n - 2).
    """
    length, slack = sum(counts), max(1, 2 * len(counts) - 2)
    got, source, nth = [0] * len(counts), [], []
    deadline = [-(-(slack - 1) * length // (slack * count)) for count in counts]
    for p in range(1, length + 1):
        chosen, soonest = -1, 0
        for i, count in enumerate(counts):
            waited = slack * (count * p - length * got[i]) >= length
            if waited and (chosen < 0 or deadline[i] < soonest):
                chosen, soonest = i, deadline[i]
        source.append(chosen)
        nth.append(got[chosen])
        got[chosen] += 1
        behind = slack * (got[chosen] + 1) - 1
        deadline[chosen] = -(-behind * length // (slack * counts[chosen]))
    return Period(np.asarray(source), np.asarray(nth), counts)
