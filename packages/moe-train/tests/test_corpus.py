"""Text is split by file, and is known by its hash."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.corpus import Corpus, CorpusError, load_corpus, reference_losses


def test_the_standard_library_is_there_and_split_by_file() -> None:
    corpus = load_corpus(None, ".py")
    train, held_out = corpus.train.tobytes(), corpus.held_out.tobytes()
    assert len(train) > 5_000_000
    assert 0.01 < len(held_out) / len(train) < 0.3
    assert b"class OrderedDict(dict):" in train + held_out
    assert train.count(0) + held_out.count(0) >= sum(corpus.num_files)
    longest = max(held_out.split(b"\0"), key=len)
    assert longest not in train


def test_no_file_is_in_both_parts_and_none_is_lost(text_folder) -> None:
    corpus = load_corpus(text_folder, ".py")
    files = {path.read_bytes() for path in text_folder.iterdir()}
    train = corpus.train.tobytes().split(b"\0")[:-1]
    held_out = corpus.held_out.tobytes().split(b"\0")[:-1]
    assert set(train) | set(held_out) == files
    assert not set(train) & set(held_out)
    assert corpus.num_files == (len(train), len(held_out)) == (7, 1)


@pytest.mark.parametrize("change", ["content", "name", "new file"])
def test_the_digest_changes_with(text_folder, change) -> None:
    before = load_corpus(text_folder, ".py").digest
    assert load_corpus(text_folder, ".py").digest == before
    first = text_folder / "file0.py"
    if change == "content":
        first.write_text(first.read_text().replace("x", "y", 1))
    elif change == "name":
        first.rename(text_folder / "other.py")
    else:
        (text_folder / "file9.py").write_text("pass\n")
    assert load_corpus(text_folder, ".py").digest != before


def test_missing_folder_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(CorpusError, match=r"data.path .*/nowhere is not a folder"):
        load_corpus(tmp_path / "nowhere", ".py")


@pytest.mark.parametrize("names", [[], ["a.py"], ["a.txt", "b.txt"]])
def test_folder_without_two_texts_is_refused(tmp_path, names) -> None:
    for name in names:
        (tmp_path / name).write_text("text")
    (tmp_path / "empty.py").touch()
    with pytest.raises(CorpusError, match=r"non-empty files named \*.py; two are needed"):
        load_corpus(tmp_path, ".py")


def runs(text: bytes, length: int) -> list[bytes]:
    return [text[i : i + length] for i in range(len(text) - length + 1)]


@given(train=st.binary(min_size=3, max_size=80), held_out=st.binary(min_size=3, max_size=40))
def test_reference_losses_are_those_of_counting(train, held_out) -> None:
    corpus = Corpus(
        np.frombuffer(train, np.uint8), np.frombuffer(held_out, np.uint8), (1, 1), "", ""
    )
    ones, twos, threes = (Counter(runs(train, n)) for n in (1, 2, 3))
    contexts1, contexts2 = Counter(runs(train[:-1], 1)), Counter(runs(train[:-1], 2))

    def unigram(text: bytes) -> float:
        return (ones[text] + 1) / (len(train) + 256)

    def bigram(text: bytes) -> float:
        return (twos[text] + unigram(text[1:])) / (contexts1[text[:1]] + 1)

    def trigram(text: bytes) -> float:
        return (threes[text] + bigram(text[1:])) / (contexts2[text[:2]] + 1)

    want2 = [-math.log(bigram(text)) for text in runs(held_out, 2)]
    want3 = [-math.log(trigram(text)) for text in runs(held_out, 3)]
    got = reference_losses(corpus)
    assert got["bigram"] == pytest.approx(sum(want2) / len(want2), rel=1e-9)
    assert got["trigram"] == pytest.approx(sum(want3) / len(want3), rel=1e-9)
