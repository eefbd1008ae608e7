"""Packed rows hold every prediction of every document once, and none across documents."""

import math
from collections import Counter
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.corpus import CorpusError
from moe_train.data import IGNORED, Tokens, packing
from moe_train.data.packing import PackedSequences

lengths = st.lists(st.lists(st.integers(1, 25), min_size=1, max_size=12), min_size=1, max_size=3)


def documents(pieces: list[list[int]]) -> Tokens:
    """Documents of these lengths, in which every token is another one."""
    arrays, ends, first = [], [], 1
    for sizes in pieces:
        arrays.append(np.arange(first, first + sum(sizes), dtype=np.uint16))
        ends.append(np.cumsum(sizes))
        first += sum(sizes)
    return Tokens(tuple(arrays), tuple(ends), 2**16, 0, "documents")


def rows_of(packed: PackedSequences):
    batch = packed.batch(np.arange(packed.count))
    return batch, batch.inputs_BS.numpy(), batch.targets_BS.numpy(), batch.document_BS.numpy()


@given(pieces=lengths, length=st.integers(1, 12), block=st.sampled_from([1, 3, 8192]))
def test_every_prediction_of_every_document_is_made_once(pieces, length, block) -> None:
    tokens = documents(pieces)
    want = Counter()
    for i in range(tokens.num_documents):
        ids = tokens.read(*tokens.document(i)).tolist()
        want.update(pairwise(ids))
    with mock.patch.object(packing, "_BLOCK", block):
        if not want:
            with pytest.raises(CorpusError, match="no document of documents has two tokens"):
                PackedSequences(tokens, length)
            return
        packed = PackedSequences(tokens, length)
    batch, inputs, targets, _ = rows_of(packed)
    real = targets != IGNORED
    assert Counter(zip(inputs[real].tolist(), targets[real].tolist(), strict=True)) == want
    assert batch.valid_B.tolist() == real.sum(1).tolist()
    assert batch.num_tokens == packed.num_tokens(np.arange(packed.count)) == sum(want.values())
    assert packed.fill == pytest.approx(real.mean())


@given(pieces=lengths, length=st.integers(1, 12))
def test_documents_are_numbered_within_a_row_and_padding_is_one_of_its_own(pieces, length) -> None:
    pieces = [*pieces, [2]]
    tokens = documents(pieces)
    batch, inputs, targets, document = rows_of(PackedSequences(tokens, length))
    assert batch.documents_B.tolist() == (document[:, -1] + 1).tolist()
    of = np.searchsorted(
        [tokens.document(i)[1] for i in range(tokens.num_documents)], inputs - 1, "right"
    )
    for row in range(len(inputs)):
        steps = np.diff(document[row])
        assert document[row, 0] == 0
        assert set(steps.tolist()) <= {0, 1}
        real = targets[row] != IGNORED
        assert not real[len(real) - (~real).sum() :].any()  # padding is at the end
        for number in set(document[row, real].tolist()):
            where = document[row] == number
            assert real[where].all()
            assert len(set(of[row, where].tolist())) == 1  # a part of one document
            assert (np.diff(inputs[row, where]) == 1).all()  # without a gap


@given(pieces=lengths, length=st.integers(1, 12))
def test_no_document_that_fits_is_cut(pieces, length) -> None:
    packed = PackedSequences(documents([*pieces, [2]]), length)
    sizes = Counter(packed._parts[:, 1].tolist())
    predictions = [n - 1 for part in [*pieces, [2]] for n in part if n > 1]
    want = Counter(n for n in predictions if n <= length)
    want.update(length for n in predictions if n > length for _ in range(n // length))
    want.update(n % length for n in predictions if n > length and n % length)
    assert sizes == want


@given(sizes=st.lists(st.integers(2, 13), min_size=1, max_size=40))
def test_rows_are_few(sizes) -> None:
    packed = PackedSequences(documents([sizes]), 12)
    places = sum(size - 1 for size in sizes)
    best = math.ceil(places / 12)
    assert packed.count <= max(math.ceil(1.5 * best), best + 1)  # best fit, sorted: 11/9 and 1


def test_the_index_of_an_earlier_start_is_mapped_and_that_of_other_text_is_not(tmp_path) -> None:
    tokens = documents([[5, 9, 3, 4, 12]])
    one = PackedSequences(tokens, 6, tmp_path, "a")
    with mock.patch.object(packing, "_index", side_effect=AssertionError("made again")):
        again = PackedSequences(tokens, 6, tmp_path, "a")
        assert isinstance(again._parts, np.memmap)
        assert (rows_of(again)[1] == rows_of(one)[1]).all()
        for length, identity in ((7, "a"), (6, "b")):
            with pytest.raises(AssertionError, match="made again"):
                PackedSequences(tokens, length, tmp_path, identity)
    assert len(list(tmp_path.iterdir())) == 2
