"""A mixture gives each source its share of every stretch of the order, and loses nothing of it."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.corpus import CorpusError
from moe_train.data import IGNORED, Sequences, Tokens
from moe_train.data.mixture import FINEST, Mixture, make_period
from moe_train.data.packing import PackedSequences

weights = st.lists(st.fractions(Fraction(1, 50), 3, max_denominator=60), min_size=1, max_size=5)


def source(count: int, first: int = 0) -> Sequences:
    """Sequences of one token whose id says which sequence it is."""
    ids = np.arange(first, first + count + 1, dtype=np.uint32)
    return Sequences(Tokens((ids,), (np.asarray([len(ids)]),), 2**32, len(ids), "ids"), 1)


def mixture(counts, weights) -> Mixture:
    names = [f"s{i}" for i in range(len(weights))]
    sources = {n: source(c, 1000 * i) for i, (n, c) in enumerate(zip(names, counts, strict=True))}
    return Mixture(sources, dict(zip(names, weights, strict=True)))


@given(counts=st.lists(st.integers(1, 60), min_size=1, max_size=6))
def test_no_source_is_ever_a_whole_position_off_its_share(counts) -> None:
    period = make_period(tuple(counts))
    share = np.asarray(counts) / sum(counts)
    got = np.cumsum(period.source[:, None] == np.arange(len(counts)), axis=0)
    want = np.arange(1, sum(counts) + 1)[:, None] * share
    assert np.abs(got - want).max() <= 1 - 1 / max(2, 2 * len(counts) - 2) + 1e-9 < 1
    assert got[-1].tolist() == counts


@given(weights=weights, first=st.integers(0, 300), number=st.integers(1, 200))
def test_any_window_has_the_fractions_of_the_weights(weights, first, number) -> None:
    mixed = mixture([7] * len(weights), weights)
    source = mixed._source(mixed.order(first, number, seed=0))
    for i, weight in enumerate(weights):
        share = float(weight / sum(weights))
        assert abs((source == i).sum() - share * number) < 2
        whole = mixed._source(mixed.order(0, first + number, seed=0))
        assert abs((whole == i).sum() - share * (first + number)) < 1


@given(weights=weights, data=st.data(), seed=st.integers(0, 2**40), positions=st.integers(1, 400))
def test_every_source_has_epochs_of_its_own(weights, data, seed, positions) -> None:
    counts = [data.draw(st.integers(1, 12)) for _ in weights]
    mixed = mixture(counts, weights)
    tokens = mixed.batch(mixed.order(0, positions, seed)).inputs_BS[:, 0].numpy()
    for i, count in enumerate(counts):
        seen = tokens[tokens // 1000 == i] - 1000 * i
        for at in range(0, len(seen), count):
            epoch = seen[at : at + count]
            assert len(set(epoch.tolist())) == len(epoch)
            assert len(epoch) < count or set(epoch.tolist()) == set(range(count))


@given(weights=weights, first=st.integers(0, 300), number=st.integers(1, 60))
def test_any_window_is_cut_from_one_order(weights, first, number) -> None:
    mixed = mixture([5] * len(weights), weights)
    whole = mixed.order(0, first + number, seed=2)
    assert mixed.order(first, number, seed=2).tolist() == whole[first:].tolist()


def test_weights_finer_than_a_period_are_rounded_and_too_small_ones_refused() -> None:
    mixed = mixture([5, 5], [Fraction("0.1234567"), Fraction("0.8765433")])
    assert mixed.fractions["s0"] == pytest.approx(0.1234567, abs=1 / FINEST)
    with pytest.raises(CorpusError, match="the weight of s0 is 1e-06 of the sum; less than 1e-05"):
        mixture([5, 5], [Fraction(1), Fraction(999_999)])


def test_a_batch_has_its_sequences_in_the_order_that_was_asked_for() -> None:
    mixed = mixture([9, 9, 9], [Fraction(1), Fraction(2), Fraction(1)])
    numbers = np.asarray([20, 3, 11, 0, 26])
    assert mixed.batch(numbers).inputs_BS[:, 0].tolist() == [2002, 3, 1002, 0, 2008]
    assert mixed.num_tokens(numbers) == 5
    assert len(mixed.batch(numbers[:0]).inputs_BS) == 0


def test_a_batch_of_packed_rows_keeps_what_the_host_knows_of_each() -> None:
    sizes = {"a": [3, 4, 2], "b": [6, 2, 5, 3]}
    sources = {
        name: PackedSequences(
            Tokens((np.ones(sum(n), np.uint8),), (np.cumsum(n),), 256, 0, name), 6
        )
        for name, n in sizes.items()
    }
    mixed = Mixture(sources, {"a": Fraction(1), "b": Fraction(1)})
    batch = mixed.batch(np.arange(mixed.count)[::-1])
    assert batch.valid_B.tolist() == (batch.targets_BS != IGNORED).sum(1).tolist()
    assert batch.documents_B.tolist() == (batch.document_BS[:, -1] + 1).tolist()
    assert batch.num_tokens == mixed.num_tokens(np.arange(mixed.count)) == 6 + 12
    assert len(set(batch.documents_B.tolist())) > 1


def test_sources_of_equal_size_are_not_visited_in_step() -> None:
    mixed = mixture([100, 100], [Fraction(1), Fraction(1)])
    numbers = mixed.order(0, 200, seed=0)
    one, other = numbers[mixed._source(numbers) == 0], numbers[mixed._source(numbers) == 1] - 100
    assert (one != other).any()
