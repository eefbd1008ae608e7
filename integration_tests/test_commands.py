"""Commands beside ``run``, as a user starts them."""

import json
import sys
from pathlib import Path

import cli_run
import pytest


def said(*words: str) -> str:
    arguments = [sys.executable, "-m", "moe_train", *words]
    code, out, err = cli_run.finish(cli_run.start(arguments))
    assert code == 0, out + err
    return out


def test_two_ranks_measure_what_one_measures(tmp_path: Path) -> None:
    code, out, err = cli_run.finish(cli_run.start(cli_run.command(tmp_path, train__steps=4)))
    assert code == 0, out + err
    one = json.loads(said("eval", str(tmp_path), "--json"))
    two = json.loads(said("eval", str(tmp_path), "--json", "--nproc", "2", "--mesh.ep", "2"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-9)
    assert two["tokens"] == one["tokens"]
    assert one["loss"] == json.loads((tmp_path / "result.json").read_text())["validation_loss"]
