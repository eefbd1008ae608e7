"""Token shards hold what the text says, and show every way in which they do not."""

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.commands.data import main
from moe_train.corpus import CorpusError, load_corpus
from moe_train.data import build as builder
from moe_train.data.build import build, plan_build
from moe_train.data.shards import Shards, is_shards
from moe_train.data.tokenizer import ByteTokenizer, FileTokenizer
from moe_train.load_config import ConfigError


def make(text, out, tokenizer=None, **options) -> Shards:
    tokenizer = tokenizer or ByteTokenizer()
    return build(plan_build(text, ".py", tokenizer, out=out, **options), out)


def ids(shards: Shards, part: str) -> np.ndarray:
    tokens = shards.tokens(part)
    return tokens.read(0, len(tokens))


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("shard_tokens", [1, 2000, 1 << 30])
def test_shards_of_bytes_are_the_text_that_a_run_reads(text_folder, tmp_path, shard_tokens) -> None:
    corpus = load_corpus(text_folder, ".py")
    shards = make(text_folder, tmp_path / "s", shard_tokens=shard_tokens)
    for part in ("train", "held_out"):
        tokens = shards.tokens(part)
        assert (ids(shards, part) == getattr(corpus, part)).all()
        ends = [tokens.document(i)[1] for i in range(tokens.num_documents)]
        assert ends == getattr(corpus, f"{part}_ends").tolist()
        assert tokens.bytes_per_token == 1
    assert len(shards.files["train"]) == {1: 7, 2000: 4, 1 << 30: 1}[shard_tokens]
    shards.verify()


def test_a_tokenizer_file_gives_the_ids_that_its_library_gives(
    text_folder, tmp_path, tokenizer_file
) -> None:
    from tokenizers import Tokenizer

    shards = make(text_folder, tmp_path / "s", FileTokenizer(tokenizer_file, "</s>"))
    reader = Tokenizer.from_file(str(tokenizer_file))
    corpus = load_corpus(text_folder, ".py")
    for part in ("train", "held_out"):
        texts = getattr(corpus, part).tobytes().decode().split("\0")[:-1]
        want = [i for text in texts for i in [*reader.encode(text).ids, reader.token_to_id("</s>")]]
        assert ids(shards, part).tolist() == want
        tokens = shards.tokens(part)
        assert tokens.num_documents == len(texts)
        assert tokens.num_bytes == sum(len(text.encode()) for text in texts)
        assert tokens.bytes_per_token > 2
        start, stop = tokens.document(0)
        assert shards.tokenizer().decode(tokens.read(start, stop - 1)) == texts[0]
    assert shards.vocab_size == reader.get_vocab_size()
    assert shards.tokenizer().eos == reader.token_to_id("</s>")


@given(vocab_size=st.sampled_from([2, 256, 257, 65536, 65537, 2**32]), data=st.data())
def test_any_vocabulary_is_stored_in_the_narrowest_dtype(
    vocab_size, data, tmp_path_factory
) -> None:
    rows = data.draw(
        st.lists(
            st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=4), min_size=2, max_size=4
        )
    )
    folder = tmp_path_factory.mktemp("t")
    text, out = folder / "text", folder / "out"
    text.mkdir()
    for i, row in enumerate(rows):
        (text / f"{i}.py").write_text(json.dumps(row))

    class Numbers:
        eos = None
        digest = "bytes"

        def encode(self, texts):
            return [np.asarray(json.loads(text), np.uint32) for text in texts]

    numbers = Numbers()
    numbers.vocab_size = vocab_size
    shards = build(plan_build(text, ".py", numbers, out=out, held_out=0), out)
    assert ids(shards, "train").tolist() == [i for row in rows for i in row]
    assert shards.dtype.itemsize == min(n for n in (1, 2, 4) if vocab_size <= 256**n)
    assert len(shards.tokens("held_out")) == 0


@pytest.mark.parametrize("at", range(0, 24, 3))
def test_a_build_that_was_interrupted_goes_on_to_the_same_bytes(
    text_folder, tmp_path, monkeypatch, at
) -> None:
    want = make(text_folder, tmp_path / "whole", shard_tokens=2000)
    left = [at]

    class Stopped(BaseException):
        pass

    def fsync(file) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Stopped

    with monkeypatch.context() as patch:
        patch.setattr(builder.os, "fsync", fsync)
        try:
            make(text_folder, tmp_path / "cut", shard_tokens=2000)
        except Stopped:
            with pytest.raises(CorpusError, match=r"is half built|no token shards"):
                Shards(tmp_path / "cut")
    if left[0] < 0:
        shards = make(text_folder, tmp_path / "cut", shard_tokens=2000)
        assert shards.digest == want.digest
    assert files(tmp_path / "cut") == files(tmp_path / "whole")


def test_a_build_that_goes_on_does_not_read_again_what_is_done(
    text_folder, tmp_path, monkeypatch
) -> None:
    read = []
    original = builder._read

    def count(plan, name) -> bytes:
        read.append(name)
        if len(read) == 5:
            raise OSError("the disk went away")
        return original(plan, name)

    monkeypatch.setattr(builder, "_read", count)
    monkeypatch.setattr(builder, "_AT_ONCE", 1)
    with pytest.raises(OSError, match="went away"):
        make(text_folder, tmp_path / "s", shard_tokens=1)
    make(text_folder, tmp_path / "s", shard_tokens=1)
    assert len(read) == 5 + 8 - 4


@pytest.mark.parametrize("change", ["text", "suffix", "tokenizer", "shard_tokens"])
def test_a_half_built_folder_takes_no_other_plan(
    text_folder, tmp_path, monkeypatch, change
) -> None:
    out = tmp_path / "s"
    with monkeypatch.context() as patch:
        patch.setattr(builder, "index_text", lambda **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(text_folder, out)
    tokenizer, options = ByteTokenizer(), {}
    if change == "text":
        (text_folder / "file3.py").write_text("other\n")
    elif change == "suffix":
        (text_folder / "more.py").write_text("more\n")
    elif change == "tokenizer":
        tokenizer = ByteTokenizer(eos=False)
    else:
        options = {"shard_tokens": 7}
    with pytest.raises(CorpusError, match="half built from other text, another tokenizer"):
        make(text_folder, out, tokenizer, **options)


def test_what_is_no_build_is_left_alone(text_folder, tmp_path) -> None:
    out = tmp_path / "s"
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(CorpusError, match="is not empty"):
        make(text_folder, out)
    assert files(out) == {"thesis.tex": b"years of work"}
    make(text_folder, tmp_path / "t")
    with pytest.raises(CorpusError, match="holds finished token shards"):
        make(text_folder, tmp_path / "t")


def _rewrite(key, value):
    def change(folder) -> None:
        index = json.loads((folder / "index.json").read_text())
        index[key] = value
        (folder / "index.json").write_text(json.dumps(index))

    return change


def _first(**values):
    def change(folder) -> None:
        index = json.loads((folder / "index.json").read_text())
        index["parts"]["train"][0] |= values
        (folder / "index.json").write_text(json.dumps(index))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "index.json").write_text("{"), "is not JSON"),
        (lambda f: (f / "index.json").write_text("[]"), "not an index"),
        (lambda f: (f / "index.json").unlink(), "holds no token shards"),
        (_rewrite("version", 2), "of version 1: format .* 2"),
        (_rewrite("dtype", "float32"), "of version 1: 'float32'"),
        (_rewrite("parts", {"train": []}), "of version 1: 'held_out'"),
        (_rewrite("tokenizer", {}), "of version 1: 'eos'"),
        (_rewrite("tokenizer", {"eos": 0, "sha256": 3}), "does not describe a tokenizer"),
        (_rewrite("vocab_size", 0), "vocab_size 0, and 0 ends a document"),
        (_first(name="../../secret"), "does not describe a shard"),
        (_first(tokens=-1), "does not describe a shard"),
        (_first(tokens=10**6), r"train-00000.bin has \d+ bytes; the index says 1000000 bytes"),
        (lambda f: (f / "train-00000.ends").unlink(), "train-00000.ends is missing"),
        (lambda f: os.truncate(f / "train-00000.bin", 9), "train-00000.bin has 9 bytes"),
    ],
)
def test_a_folder_that_is_not_as_the_index_says_is_refused_when_opened(
    text_folder, tmp_path, change, message
) -> None:
    make(text_folder, tmp_path / "s")
    change(tmp_path / "s")
    with pytest.raises(CorpusError, match=message):
        Shards(tmp_path / "s").tokens("train")


@pytest.mark.parametrize("name", ["train-00000.bin", "train-00000.ends"])
def test_one_changed_byte_is_found_by_inspect(text_folder, tmp_path, capsys, name) -> None:
    make(text_folder, tmp_path / "s")
    assert main(["inspect", str(tmp_path / "s")]) == 0
    path = tmp_path / "s" / name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    path.write_bytes(content)
    assert main(["inspect", str(tmp_path / "s")]) == 1
    assert f"{name.partition('.')[0]} is damaged" in capsys.readouterr().err


def test_another_tokenizer_in_the_folder_is_refused(text_folder, tmp_path, tokenizer_file) -> None:
    shards = make(text_folder, tmp_path / "s", FileTokenizer(tokenizer_file))
    file = tmp_path / "s" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")
    with pytest.raises(CorpusError, match="is not the tokenizer that made the shards"):
        shards.tokenizer()


def test_build_and_inspect_say_what_is_there(text_folder, tmp_path, capsys, tokenizer_file) -> None:
    (text_folder / "file0.py").write_text("x = 'ä\x1b[31m'\n")
    words = ["--path", str(text_folder), "--tokenizer", str(tokenizer_file), "--eos", "</s>"]
    assert main(["build", str(tmp_path / "s"), *words, "--held-out", "50"]) == 0
    said = capsys.readouterr().out
    assert "stored as uint16; 0 ends a document" in said
    assert "in 4 documents" in said
    assert main(["inspect", str(tmp_path / "s"), "--samples", "8"]) == 0
    said = capsys.readouterr().out
    assert "def f0(x):\\n    return" in said
    assert "\\x1b[31m" in said
    assert "\x1b" not in said
    assert "bytes is as it was written" in said


def test_text_that_is_not_utf8_is_refused_by_place_and_can_be_replaced(
    text_folder, tmp_path, tokenizer_file
) -> None:
    (text_folder / "file2.py").write_bytes(b"ab\xffcd")
    words = ["build", str(tmp_path / "s"), "--path", str(text_folder)]
    words += ["--tokenizer", str(tokenizer_file)]
    with pytest.raises(CorpusError, match=r"file2.py is not UTF-8 at byte 2; --replace-invalid"):
        main(words)
    assert main([*words, "--replace-invalid"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["make"], "unknown command 'data make'"),
        (["build"], "OUT is missing"),
        (["build", "{out}", "--paht", "x"], "nearest: --path"),
        (["build", "{out}", "--held-out", "100"], "from 0 to below 100, got 100"),
        (["build", "{out}", "--shard-tokens", "0"], "at least 1, got 0"),
        (["build", "{out}", "--eos", "</s>"], "bytes have no such token"),
        (["build", "{out}", "--path", "/nowhere"], "/nowhere is not a folder"),
        (["build", "{out}", "--path", "{text}", "--suffix", ".no"], "holds 0 non-empty files"),
        (["build", "{out}", "--tokenizer", "/nowhere"], "cannot read the tokenizer /nowhere"),
        (["build", "{out}", "--tokenizer", "{text}/file0.py"], "is not a file of tokenizers"),
        (["build", "{out}", "--tokenizer", "{tok}", "--eos", "<end>"], "no token '<end>'.*: </s>"),
        (["inspect", "{text}"], "no token shards"),
    ],
)
def test_what_cannot_be_built_is_refused_and_leaves_nothing(
    text_folder, tmp_path, tokenizer_file, words, message
) -> None:
    places = {"out": tmp_path / "s", "text": text_folder, "tok": tokenizer_file}
    with pytest.raises((CorpusError, ConfigError), match=message):
        main([word.format(**places) for word in words])
    assert not (tmp_path / "s").exists()


def test_only_our_own_index_makes_a_folder_one_of_shards(text_folder, tmp_path) -> None:
    assert not is_shards(text_folder)
    (text_folder / "index.json").write_text('{"weight_map": {}}')
    assert not is_shards(text_folder)
    make(text_folder, tmp_path / "s")
    assert is_shards(tmp_path / "s")
