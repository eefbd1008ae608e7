"""``moe-train config`` says what a run would do, where each value is from and what it changes."""

import dataclasses
import json
import tomllib

import pytest
from moe_train.cli import command
from moe_train.config import RunConfig
from moe_train.config.kinds import harmless
from moe_train.load_config import from_dict, load_config, to_dict, to_toml
from moe_train.load_config.explain import about_sections, explain
from moe_train.load_config.tree import leaves_of, walk


def said(capsys, *argv: str, code: int = 0) -> str:
    assert command(["config", *argv]) == code
    return capsys.readouterr().out


def test_print_names_the_source_of_every_value(capsys, tmp_path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[model]\ndim = 64\n[optimizer]\nlr = 0.5\n")
    words = ["print", "--config", str(file), "--optimizer.lr", "0.25"]
    rows = json.loads(said(capsys, *words, "--output", "json"))
    assert rows.keys() == leaves_of(RunConfig).keys()
    assert rows["model.dim"] == {"value": 64, "source": str(file)}
    assert rows["optimizer.lr"] == {"value": 0.25, "source": "--optimizer.lr"}
    assert rows["model.top_k"] == {"value": RunConfig().model.top_k, "source": "default"}
    lines = dict(line.split("#") for line in said(capsys, *words).splitlines())
    [lr] = [source for text, source in lines.items() if text.strip() == "optimizer.lr = 0.25"]
    assert lr.strip() == "--optimizer.lr"


def test_printed_toml_is_read_back_as_the_same_run(capsys, tmp_path) -> None:
    words = ["--model.dim", "64", "--data.path", "some/where", "--routing.bias"]
    text = said(capsys, "print", *words, "--output", "toml")
    (tmp_path / "a.toml").write_text(text)
    first = load_config(RunConfig, words, prog="", description="")
    again = ["--config", str(tmp_path / "a.toml")]
    assert load_config(RunConfig, again, prog="", description="") == first
    assert tomllib.loads(text) == tomllib.loads(to_toml(first))


def test_every_setting_and_section_is_explained(capsys) -> None:
    for name, setting in explain(RunConfig).items():
        assert setting.about, name
        assert setting.about in said(capsys, "explain", name), name
    for name, about in about_sections(RunConfig).items():
        assert about
        assert about in said(capsys, "explain", name)
    rows = json.loads(said(capsys, "explain", "--json"))
    assert [row["key"] for row in rows] == list(leaves_of(RunConfig))
    assert all(row["changes"] in ("mathematics", "speed", "observation") for row in rows)


def test_explain_takes_a_flag_as_it_is_written(capsys) -> None:
    assert said(capsys, "explain", "model.top_k") == said(capsys, "explain", "--name=--model.top-k")


def test_diff_tells_what_changes_the_mathematics_from_what_does_not(capsys, tmp_path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.toml").write_text(to_toml(RunConfig()))
    other = tmp_path / "b.toml"
    other.write_text("[model]\ndim = 64\n[mesh]\nep = 2\n[train]\nlog_every = 1\n")
    out = said(capsys, "diff", str(run), str(other), code=1)
    before = RunConfig()
    mathematics, _, rest = out.partition("speed (")
    speed, _, observation = rest.partition("observation (")
    assert f"model.dim: {before.model.dim} -> 64" in mathematics
    assert "mesh.ep: 1 -> 2" in speed
    assert f"train.log_every: {before.train.log_every} -> 1" in observation
    rows = json.loads(said(capsys, "diff", str(run), str(other), "--json", code=1))
    assert {row["key"]: row["changes"] for row in rows} == {
        "model.dim": "mathematics", "mesh.ep": "speed", "train.log_every": "observation",
    }  # fmt: skip
    assert "the same" in said(capsys, "diff", str(run), str(run))


def test_what_is_called_harmless_exists() -> None:
    assert harmless() <= leaves_of(RunConfig).keys()


@pytest.mark.parametrize("bad", ["missing.toml", "text.toml", "unknown.toml"])
def test_a_file_that_cannot_be_compared_is_named(capsys, tmp_path, bad) -> None:
    (tmp_path / "text.toml").write_text("not toml")
    (tmp_path / "unknown.toml").write_text("[model]\nwidth = 1\n")
    assert command(["config", "diff", str(tmp_path / bad), str(tmp_path / bad)]) == 2
    assert bad in capsys.readouterr().err


def test_a_tree_survives_walking() -> None:
    config = dataclasses.replace(RunConfig(), nproc=3)
    tree = to_dict(config)
    assert dict(walk(tree))["nproc"] == 3
    assert from_dict(RunConfig, tree) == config
