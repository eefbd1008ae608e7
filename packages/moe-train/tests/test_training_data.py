"""Whatever a run reads, it reads alike, and refuses what it cannot read before any work."""

import json
from dataclasses import replace

import numpy as np
import pytest
from moe_train.cli import command
from moe_train.config import DataConfig
from moe_train.corpus import CorpusError
from moe_train.data.build import build, plan_build
from moe_train.data.shards import Shards
from moe_train.data.tokenizer import ByteTokenizer, FileTokenizer
from moe_train.data.training import open_data
from moe_train.metrics import read_metrics

SIZES = {
    "model.dim": 16, "model.num-layers": 1, "model.num-heads": 2, "model.num-kv-heads": 1,
    "model.num-experts": 4, "model.expert-dim": 8, "model.shared-dim": 8, "train.steps": 4,
    "train.batch-size": 4, "train.eval-sequences": 8, "train.sample-bytes": 4,
    "train.log-every": 1, "train.threads": 1, "train.device": "cpu", "data.sequence-length": 16,
    "model.vocab-size": 300,
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def run(folder, *extra: str, **settings) -> int:
    flags = SIZES | {k.replace("__", "."): v for k, v in settings.items()}
    words = [w for key, value in flags.items() for w in (f"--{key}", str(value))]
    return command(["run", "--run-dir", str(folder), *words, *extra])


def shards(text, out, tokenizer=None, **options) -> Shards:
    plan = plan_build(text, ".py", tokenizer or ByteTokenizer(), out=out, **options)
    return build(plan, out)


def opened(tmp_path, vocab_size=300, **settings):
    config = DataConfig(sequence_length=16, **settings)
    return open_data(config, vocab_size, tmp_path / "run")


def records(folder, kind: str) -> list[dict]:
    return [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == kind]


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_text_and_shards_of_it_are_the_same_data(text_folder, tmp_path, packing) -> None:
    shards(text_folder, tmp_path / "s", shard_tokens=2000)
    one = opened(tmp_path, path=text_folder, packing=packing)
    other = opened(tmp_path, path=tmp_path / "s", packing=packing)
    for a, b in ((one.train, other.train), (one.validation, other.validation)):
        assert a.count == b.count
        numbers = np.arange(a.count)
        assert (a.batch(numbers).inputs_BS == b.batch(numbers).inputs_BS).all()
        assert (a.batch(numbers).targets_BS == b.batch(numbers).targets_BS).all()
    assert other.bytes_per_token == 1
    assert other.describe(2.0) == "2.0000 nats a byte"


def test_text_is_tokenised_once_and_again_only_when_it_changes(
    text_folder, tmp_path, tokenizer_file
) -> None:
    settings = {"path": text_folder, "tokenizer": tokenizer_file, "eos": "</s>"}
    want = shards(text_folder, tmp_path / "s", FileTokenizer(tokenizer_file, "</s>"))
    first = opened(tmp_path, **settings)
    assert first.digest == want.digest == opened(tmp_path, **settings).digest
    [folder] = [p for p in (tmp_path / "run" / "tokens").iterdir() if p.is_dir()]
    (folder / "train-00000.bin").write_bytes(b"")
    with pytest.raises(CorpusError, match="has 0 bytes"):
        opened(tmp_path, **settings)  # so it was not made again
    with (text_folder / "file1.py").open("a") as file:
        file.write("other = 1\n")
    assert opened(tmp_path, **settings).digest != first.digest


def test_a_loss_of_tokens_is_told_for_bytes_too(text_folder, tmp_path, tokenizer_file) -> None:
    built = shards(text_folder, tmp_path / "s", FileTokenizer(tokenizer_file, "</s>"))
    data = opened(tmp_path, path=tmp_path / "s")
    held_out = built.tokens("held_out")
    size = sum(p.stat().st_size for p in text_folder.iterdir()) / 8
    assert data.bytes_per_token == pytest.approx(size / len(held_out), rel=0.01)
    loss = 3.0
    assert data.describe(loss) == f"3.0000 nats a token, {3 / data.bytes_per_token:.4f} a byte"


def refusals(text, out, tokenizer_file):
    tokens = out / "tokens"
    shards(text, tokens, FileTokenizer(tokenizer_file))
    shards(text, out / "bytes")
    shards(text, out / "all", held_out=0)
    (out / "empty").mkdir()
    return [
        ({"path": tokens}, 299, "must be at least 300, the vocabulary of the token shards .* 299"),
        (
            {"path": text},
            255,
            "must be at least 256, the vocabulary of text read as bytes, got 255",
        ),
        ({"path": text, "tokenizer": tokenizer_file}, 256, "must be at least 300"),
        ({"path": out / "empty"}, 300, r"holds 0 non-empty files named \*.py"),
        ({"path": out / "no"}, 300, "is not a folder"),
        ({"path": out / "all"}, 300, "nothing is held out"),
        ({"path": tokens, "tokenizer": tokenizer_file}, 300, "which bring their own"),
        (
            {"sources": (f"a=1:{tokens}", f"b=1:{out / 'bytes'}")},
            300,
            "a and b are of different tokenizers",
        ),
    ]


def test_what_cannot_be_read_is_refused(text_folder, tmp_path, tokenizer_file) -> None:
    for settings, vocab_size, message in refusals(text_folder, tmp_path, tokenizer_file):
        with pytest.raises(CorpusError, match=message):
            opened(tmp_path, vocab_size, **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sources": ("code",)}, "'code' is not name=weight:folder"),
        ({"sources": ("code=0.5",)}, "is not name=weight:folder"),
        ({"sources": ("a=x:b",)}, "'x' of 'a=x:b' is not a number"),
        ({"sources": ("a=1/0:b",)}, "'1/0' of 'a=1/0:b' is not a number"),
        ({"sources": ("a=nan:b",)}, "'nan' of 'a=nan:b' is not a number"),
        ({"sources": ("a=0:b",)}, "weight of a must be positive, got 0"),
        ({"sources": ("a=-1:b",)}, "weight of a must be positive, got -1"),
        ({"sources": ("a=1:b", "a=2:c")}, "two are called 'a'"),
        ({"sources": ("a=1:b",), "path": "c"}, "set one of them"),
        ({"eos": "</s>"}, "'</s>' is a token of data.tokenizer, which is not set"),
        ({"prefetch": -1}, "prefetch must be 0 or more, got -1"),
    ],
)
def test_impossible_settings_of_data_are_refused(settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig(**settings)


def test_a_run_of_packed_tokens_of_a_mixture_goes_on_bit_for_bit(
    text_folder, tmp_path, tokenizer_file, capsys
) -> None:
    tokenizer = FileTokenizer(tokenizer_file, "</s>")
    shards(text_folder, tmp_path / "s", tokenizer, shard_tokens=300)
    shards(text_folder, tmp_path / "t", tokenizer, held_out=30)
    sources = [f"one=3:{tmp_path / 's'}", f"two=1/2:{tmp_path / 't'}"]
    extra = ["--data.packing", "documents", "--data.sources", *sources]
    for _ in range(2):
        assert run(tmp_path / "a", *extra) == 0
    assert run(tmp_path / "b", *extra, train__steps=8, data__prefetch=0) == 0
    said = capsys.readouterr().out
    assert "nats a token" in said
    assert "one: " in said
    assert "% full" in said
    one, other = (
        [(r["step"], r["loss"], r["tokens"]) for r in records(tmp_path / name, "train")]
        for name in "ab"
    )
    assert one == other
    assert len(one) == 8
    assert 0 < one[-1][2] < 8 * 4 * 16  # padding is not counted
    last = records(tmp_path / "a", "eval")[-1]
    assert last["losses"].keys() == {"one", "two"}
    want = (6 * last["losses"]["one"] + last["losses"]["two"]) / 7
    assert last["loss"] == pytest.approx(want, rel=1e-12)
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["validation_loss"] == last["loss"]
    assert result["nats_per_byte"] == last["nats_per_byte"] < last["loss"]

    changed = [*extra[:-1], sources[1].replace("1/2", "1/3")]
    assert run(tmp_path / "a", *changed) == 2
    said = capsys.readouterr().err
    assert "one=3" in said
    assert "1/3" in said
    assert run(tmp_path / "a", *changed, "--data.allow-changed") == 0
    assert run(tmp_path / "a", *changed[2:], "--data.packing", "stream") == 2
    assert "data.packing: 'documents' -> 'stream'" in capsys.readouterr().err


def test_moved_shards_are_the_same_data(text_folder, tmp_path) -> None:
    shards(text_folder, tmp_path / "s")
    assert run(tmp_path / "a", data__path=tmp_path / "s") == 0
    (tmp_path / "s").rename(tmp_path / "t")
    assert run(tmp_path / "a", data__path=tmp_path / "t") == 0


def test_batches_made_ahead_change_no_bit(tiny_config, trainer_of) -> None:
    losses = []
    for prefetch in (0, 1, 3):
        data = replace(tiny_config.data, prefetch=prefetch)
        trainer = trainer_of(replace(tiny_config, data=data))
        losses.append([float(trainer.step().loss) for _ in range(3)])
        trainer.samples_seen = 8  # as after going back
        losses[-1].append(float(trainer.step().loss))
    assert losses[0] == losses[1] == losses[2]
