"""What a run has learned can be measured and read later, from its checkpoints alone."""

import io
import json
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_train.cli import command
from moe_train.sample import draw
from runs import refused, run

pytestmark = pytest.mark.usefixtures("alone")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of six steps whose text is ``text`` beside it, and its checkpoints of steps 3, 6."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text"
    text.mkdir()
    for i in range(8):
        lines = [f"def f{j}(x):\n    return x * {j % 7} + {i}\n" for j in range(40)]
        (text / f"file{i}.py").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        settings = {"routing.bias-rate": 0.05, "optimizer.lr": 0.02, "train.sample-bytes": 30}
        assert run(folder / "run", text, **settings) == 0
    return folder / "run"


def measured(capsys, *words: str) -> dict:
    capsys.readouterr()
    assert command(["eval", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def written(capsys, trained, *words: str) -> str:
    capsys.readouterr()
    base = ["generate", str(trained), "--threads", "1", "--device", "cpu", "--json"]
    assert command([*base, *words]) == 0
    return json.loads(capsys.readouterr().out)["text"]


def test_eval_finds_the_loss_that_the_run_ended_with(trained, capsys) -> None:
    result = json.loads((trained / "result.json").read_text())
    found = measured(capsys, str(trained))
    assert (found["loss"], found["step"]) == (result["validation_loss"], 6)
    assert found["bits"] == pytest.approx(found["loss"] / 0.6931471805599453)


def test_eval_measures_the_checkpoint_it_is_given(trained, capsys) -> None:
    newest = measured(capsys, str(trained))
    by_step = measured(capsys, str(trained), "--step", "3")
    by_path = measured(capsys, str(trained / "checkpoints" / "step-00000003"))
    assert by_step == by_path
    assert by_step["step"] == 3
    assert by_step["loss"] > newest["loss"]


def test_eval_reads_other_text_and_more_of_it(trained, capsys, tmp_path) -> None:
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("XYZ " * 100)
    own, other = (
        measured(capsys, str(trained), *words)
        for words in ([], ["--data.path", str(tmp_path), "--data.suffix", ".txt"])
    )
    assert other["loss"] > own["loss"]
    assert other["data"] == str(tmp_path)
    few = measured(capsys, str(trained), "--train.eval-sequences", "2")
    assert few["tokens"] == 2 * 16


def test_eval_takes_no_other_model_from_a_file(trained, capsys, tmp_path) -> None:
    file = tmp_path / "other.toml"
    file.write_text("[model]\nrope_theta = 3.0\n")
    assert command(["eval", str(trained), "--config", str(file)]) == 2
    assert "model.rope_theta is of the run and cannot be set by" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--model.dim", "32"], ["model.dim is of the run"]),
        (["--optimizer.lr", "1"], ["optimizer.lr is of the run"]),
        (["--step", "4"], ["no checkpoint of step 4", "step-00000003"]),
        (["--weights", "ema"], ["no averages of weights"]),
        (["--data.path", "/nowhere/at/all"], ["/nowhere/at/all is not a folder"]),
        (["--mesh.ep", "3"], ["ep=3"]),
    ],
)
def test_what_cannot_be_measured_is_refused(trained, capsys, words, parts) -> None:
    refused(capsys, command(["eval", str(trained), *words]), *parts)


def test_a_folder_without_a_run_is_refused(tmp_path, trained, capsys) -> None:
    refused(capsys, command(["eval", str(tmp_path / "no")]), "no folder of a run")
    refused(capsys, command(["generate", str(tmp_path)]), "holds no run")
    words = [str(trained / "checkpoints" / "step-00000003"), "--step", "3"]
    refused(capsys, command(["eval", *words]), "is one checkpoint")


def test_damage_is_found_and_named(text_folder, tmp_path, capsys) -> None:
    run(tmp_path / "a", text_folder)
    for file in (tmp_path / "a" / "checkpoints" / "step-00000006").rglob("c.*"):
        file.write_bytes(file.read_bytes()[:-1] + b"\x00\x01")
    capsys.readouterr()
    refused(capsys, command(["generate", str(tmp_path / "a")]), "step-00000006", "embedding")


def test_generate_writes_what_the_run_wrote(trained, capsys) -> None:
    text = written(capsys, trained, "--bytes", "30")
    assert text == (trained / "sample.txt").read_text()
    assert text.startswith("def ")


def test_the_seed_decides_the_text(trained, capsys) -> None:
    words = ["--bytes", "20", "--prompt", "ret", "--temperature", "2"]
    texts = [written(capsys, trained, *words, "--seed", seed) for seed in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("ret") for text in texts)


def test_one_candidate_is_the_likeliest_however_it_is_asked_for(trained, capsys) -> None:
    ways = [["--temperature", "0"], ["--top-k", "1"], ["--top-p", "0.0001"]]
    texts = {written(capsys, trained, "--bytes", "12", *way) for way in ways}
    assert len(texts) == 1
    assert texts != {written(capsys, trained, "--bytes", "12", "--temperature", "5")}


def test_a_prompt_can_come_from_the_standard_input(trained, capsys, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("xyé"))
    assert written(capsys, trained, "--prompt", "-", "--bytes", "0") == "xyé"
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    words = ["generate", str(trained), "--prompt", "-"]
    refused(capsys, command(words), "the standard input is empty")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("--top-p", "0", "top_p must be above 0"),
        ("--top-p", "1.5", "top_p"),
        ("--top-k", "-1", "top_k must be 0 or more"),
        ("--temperature", "-1", "temperature must be 0 or more"),
        ("--bytes", "-1", "bytes must be 0 or more"),
        ("--prompt", "", "at least one byte"),
    ],
)
def test_draws_that_make_no_sense_are_refused(trained, capsys, flag, value, said) -> None:
    refused(capsys, command(["generate", str(trained), f"{flag}={value}"]), said)


@given(
    st.lists(st.integers(-30, 30).map(lambda n: n / 10), min_size=2, max_size=6, unique=True),
    st.integers(1, 6),
    st.floats(0.05, 1),
    st.integers(0, 2**32),
)
@settings(max_examples=60)
def test_a_draw_is_among_the_candidates(logits, top_k, top_p, seed) -> None:
    logits_V = torch.tensor(logits, dtype=torch.float64)
    token = draw(logits_V, 0.8, top_k, top_p, torch.Generator().manual_seed(seed))
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])
    assert token in ranked[:top_k]
    p = (logits_V / 0.8).softmax(-1)
    kept = p[ranked[: min(top_k, len(logits))]]
    before = (kept / kept.sum())[: ranked.index(token)].sum()
    assert before < top_p + 1e-12
