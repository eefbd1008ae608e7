"""The data of a step depends on how many sequences were seen, and on nothing else."""

from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_train.corpus import CorpusError
from moe_train.data import IGNORED, Batch, Sequences, Tokens, rank_share, visiting_order
from moe_train.data import order as orders
from moe_train.data.order import permute

seeds = st.integers(0, 2**16)


@given(count=st.integers(1, 40), epochs=st.integers(1, 4), seed=seeds)
def test_every_epoch_visits_every_sequence_once(count, epochs, seed) -> None:
    order = visiting_order(0, count * epochs, count, seed).reshape(epochs, count)
    assert (np.sort(order, axis=1) == np.arange(count)).all()


@given(
    count=st.integers(1, 30),
    phases=st.lists(
        st.tuples(st.integers(1, 12), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 8])),
        min_size=1,
        max_size=6,
    ),
    seed=seeds,
)
def test_order_survives_interruptions_and_other_numbers_of_ranks(count, phases, seed) -> None:
    seen, got = 0, []
    for batch_size, steps, ranks in phases:
        for _ in range(steps):
            numbers = visiting_order(seen, batch_size, count, seed)
            got += [n for r in range(ranks) for n in rank_share(numbers, r, ranks)]
            seen += batch_size
    assert got == visiting_order(0, seen, count, seed).tolist()


@given(count=st.integers(1, 5000), epoch=st.integers(0, 2**30), seed=seeds)
def test_an_order_made_without_sorting_is_a_permutation(count, epoch, seed) -> None:
    assert (np.sort(permute(np.arange(count), count, epoch, seed)) == np.arange(count)).all()


@given(count=st.integers(2, 60), first=st.integers(0, 200), number=st.integers(1, 90), seed=seeds)
def test_an_order_made_without_sorting_has_epochs_too(count, first, number, seed) -> None:
    with mock.patch.object(orders, "SORTED", 1):
        order = visiting_order(0, first + number, count, seed)
        assert (visiting_order(first, number, count, seed) == order[first:]).all()
    for epoch in range(len(order) // count):
        part = order[epoch * count : (epoch + 1) * count]
        assert (np.sort(part) == np.arange(count)).all()


def test_neighbours_are_far_apart_in_an_order_made_without_sorting() -> None:
    count = 3_000_000_000  # an array of all would take 24 GB
    order = visiting_order(0, 20_000, count, seed=0)
    assert len(set(order.tolist())) == len(order)
    assert abs(order.mean() / count - 0.5) < 0.01
    steps = np.abs(np.diff(order)) / count
    assert abs(steps.mean() - 1 / 3) < 0.01  # as of independent uniform numbers
    other = visiting_order(count, 20_000, count, seed=0)
    assert abs(np.corrcoef(order, other)[0, 1]) < 0.03


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    first, second = visiting_order(0, 200, 100, seed=0).reshape(2, 100)
    assert (first != second).any()
    assert (first != visiting_order(0, 100, 100, seed=1)).any()


@given(total=st.integers(0, 20), size=st.integers(1, 6))
def test_shares_of_ranks_differ_by_one_at_most(total, size) -> None:
    shares = [len(rank_share(np.arange(total), rank, size)) for rank in range(size)]
    assert sum(shares) == total
    assert max(shares) - min(shares) <= 1


@given(length=st.integers(1, 7), extra=st.integers(1, 30), seed=seeds)
def test_sequences_cover_the_text_and_targets_are_the_next_bytes(length, extra, seed) -> None:
    text = np.random.default_rng(seed).integers(0, 256, length + extra).astype(np.uint8)
    sequences = Sequences(text, length)
    batch = sequences.batch(np.arange(sequences.count))
    covered = sequences.count * length
    assert batch.inputs_BS.flatten().tolist() == text[:covered].tolist()
    assert batch.targets_BS.flatten().tolist() == text[1 : covered + 1].tolist()
    assert len(text) - covered <= length  # no whole sequence is left out


@given(number=st.integers(1, 50), count=st.integers(1, 50))
def test_spread_takes_distinct_sequences_from_the_whole_text(number, count) -> None:
    spread = Sequences(np.zeros(count * 3 + 1, np.uint8), 3).spread(number)
    assert len(set(spread.tolist())) == len(spread) == min(number, count)
    assert spread[0] == 0
    assert spread[-1] >= count - -(-count // len(spread))


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(lambda s: sum(s) > 4),
    length=st.integers(1, 4),
)
def test_text_in_several_pieces_is_cut_as_in_one(sizes, length) -> None:
    whole = np.arange(sum(sizes), dtype=np.uint16) + 300
    cuts = np.cumsum(sizes)
    pieces = tuple(np.split(whole, cuts[:-1]))
    ends = tuple(np.asarray([size]) for size in sizes)
    one = Sequences(Tokens((whole,), (cuts,), 400, 0, "one"), length)
    many = Sequences(Tokens(pieces, ends, 400, 0, "many"), length)
    numbers = np.arange(one.count)[::-1]
    assert many.count == one.count
    assert (many.batch(numbers).targets_BS == one.batch(numbers).targets_BS).all()
    assert many.batch(numbers).inputs_BS.max() >= 300


def test_an_id_outside_of_the_vocabulary_is_refused_by_place() -> None:
    ids = np.asarray([1, 2, 3, 9, 4, 5], dtype=np.uint16)
    sequences = Sequences(Tokens((ids,), (np.asarray([6]),), 9, 6, "shards/a"), 2)
    assert sequences.batch(np.asarray([0])).targets_BS.tolist() == [[2, 3]]
    with pytest.raises(CorpusError, match="shards/a: token 3 is 9, and the vocabulary has 9"):
        sequences.batch(np.asarray([0, 1]))


def test_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(CorpusError, match=r"has 4 tokens; .*sequence_length 4 needs 5"):
        Sequences(np.zeros(4, np.uint8), 4)


@given(size=st.integers(0, 7), rows=st.integers(1, 7))
def test_microbatches_are_the_batch_in_order(size, rows) -> None:
    batch = Sequences(np.arange(60, dtype=np.uint8), 5).batch(np.arange(rows))
    micros = batch.split(size)
    assert [m.inputs_BS.tolist() for m in micros] == [
        part.tolist() for part in batch.inputs_BS.split(size or rows)
    ]


def test_tokens_without_a_target_are_not_counted() -> None:
    batch = Sequences(np.arange(60, dtype=np.uint8), 5).batch(np.arange(2))
    targets = batch.targets_BS.clone()
    targets[0, 2:] = IGNORED
    assert batch.num_tokens == 10
    assert Batch(batch.inputs_BS, targets, padded=True).num_tokens == 7


def test_tokens_that_the_host_knows_of_are_counted_without_the_device() -> None:
    batch = Sequences(np.arange(60, dtype=np.uint8), 5).batch(np.arange(3))
    documents = torch.zeros_like(batch.inputs_BS, dtype=torch.int32)
    valid = np.asarray([5, 1, 2])
    known = Batch(batch.inputs_BS, batch.targets_BS, True, documents, valid)
    assert known.num_tokens == 8
    parts = known.split(2)
    assert [part.num_tokens for part in parts] == [6, 2]
    assert [len(part.document_BS) for part in parts] == [2, 1]
