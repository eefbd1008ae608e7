"""One number is the whole state of the data: runs of any ranks and batches go through one order."""

from fractions import Fraction

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from moe_train.data import Sequences, Tokens, rank_share
from moe_train.data.mixture import Mixture
from moe_train.data.packing import PackedSequences
from moe_train.data.prefetch import Prefetcher, Request

SIZES = st.integers(1, 20)


def tokens(count: int, first: int) -> Tokens:
    """Documents of three tokens; the first of each says which it is."""
    ids = np.repeat(np.arange(first, first + count), 3).astype(np.uint32)
    return Tokens((ids,), (np.arange(3, 3 * count + 1, 3),), 2**32, 3 * count, "ids")


class Runs(RuleBasedStateMachine):
    """Starts of one run: each with its own ranks, from the cursor that the last one saved."""

    @initialize(counts=st.lists(SIZES, min_size=1, max_size=3), seed=st.integers(0, 99))
    def begin(self, counts, seed) -> None:
        self.counts, self.seed = counts, seed
        parts = {f"s{i}": PackedSequences(tokens(n, 1000 * i), 2) for i, n in enumerate(counts)}
        weights = {name: Fraction(i + 1) for i, name in enumerate(parts)}
        self.source = Mixture(parts, weights) if len(parts) > 1 else parts["s0"]
        self.cursor, self.saved, self.trained = 0, 0, []
        self.ranks: list[Prefetcher] = []
        self.restart(1, 2)

    @rule(size=st.integers(1, 4), depth=st.integers(0, 2))
    def restart(self, size, depth) -> None:
        """The run dies; what was not saved is done again by another number of ranks."""
        self.teardown()
        self.cursor = self.saved
        self.trained = self.trained[: self.saved]
        self.ranks = [Prefetcher(torch.device("cpu"), depth) for _ in range(size)]

    @rule(number=st.integers(1, 9), steps=st.integers(1, 4))
    def train(self, number, steps) -> None:
        """Steps of one batch size, which need not be a multiple of anything."""
        for _ in range(steps):
            for rank, prefetcher in enumerate(self.ranks):
                request = Request(
                    self.source, self.cursor, number, self.seed, rank, len(self.ranks)
                )
                self.trained += prefetcher.get(request).inputs_BS[:, 0].tolist()
            self.cursor += number

    @rule()
    def save(self) -> None:
        self.saved = self.cursor

    def teardown(self) -> None:
        """Compare with the order that nobody interrupted, and that order with its law."""
        for prefetcher in getattr(self, "ranks", []):
            prefetcher.close()
        if not getattr(self, "trained", []):
            return
        assert len(self.trained) == self.cursor
        straight = self.source.batch(self.source.order(0, self.cursor, self.seed))
        assert self.trained == straight.inputs_BS[:, 0].tolist()
        for i, count in enumerate(self.counts):
            mine = [t - 1000 * i for t in self.trained if t // 1000 == i]
            for at in range(0, len(mine), count):
                epoch = mine[at : at + count]
                assert len(set(epoch)) == len(epoch)
                assert len(epoch) < count or set(epoch) == set(range(count))


TestRuns = Runs.TestCase


@given(
    count=st.integers(3, 40),
    cuts=st.lists(st.integers(1, 99), min_size=20, max_size=20, unique=True),
    sizes=st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=21, max_size=21),
)
def test_two_and_a_half_epochs_with_twenty_interruptions_are_the_global_order(
    count, cuts, sizes
) -> None:
    source = Sequences(np.zeros(count + 1, np.uint8), 1)
    total = count * 5 // 2
    stops = [*sorted(min(total, c * total // 99) for c in cuts), total]
    seen, got = 0, []
    for stop, size in zip(stops, sizes, strict=True):
        while seen < stop:
            numbers = source.order(seen, min(4, stop - seen), seed=1)
            got += [n for rank in range(size) for n in rank_share(numbers, rank, size).tolist()]
            seen += len(numbers)
    assert got == source.order(0, total, seed=1).tolist()
    assert sorted(got[:count]) == sorted(got[count : 2 * count]) == list(range(count))
    assert len(set(got[2 * count :])) == total - 2 * count
