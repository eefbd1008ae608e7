"""The benchmark times whole steps, of both routings, and counts what it says."""

import json

import numpy as np
import pytest
from moe_train.cli import command
from moe_train.commands.bench import RandomSequences
from moe_train.config import ModelConfig
from moe_train.flops import train_flops_per_token
from runs import SIZES, refused

pytestmark = pytest.mark.usefixtures("alone")
MODEL = [
    w for k, v in SIZES.items() if k.startswith(("model.", "data.")) for w in (f"--{k}", str(v))
]
WORDS = ["bench", *MODEL, "--train.batch-size", "4", "--train.device", "cpu", "--measured", "2"]


def test_both_routings_are_timed_labelled_and_counted(capsys) -> None:
    assert command([*WORDS, "--warmup", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    natural, forced = found["rows"]
    assert (natural["routing"], forced["routing"]) == ("natural", "forced uniform")
    assert forced["imbalance"] == pytest.approx(1)
    assert natural["imbalance"] > 1
    model = ModelConfig(**{
        k.removeprefix("model.").replace("-", "_"): v
        for k, v in SIZES.items()
        if k.startswith("model.")
    })  # fmt: skip
    for row in found["rows"]:
        assert row["tokens"] == 4 * 16
        rate = row["tokens"] / row["milliseconds"] * 1e3
        assert row["tokens_per_second"] == pytest.approx(rate)
        flops = train_flops_per_token(model, 16) * rate / 1e12
        assert row["model_tflops"] == pytest.approx(flops)
    assert {"date", "torch", "triton", "device", "commit"} <= found["environment"].keys()


def test_it_says_what_it_is_for_people(capsys) -> None:
    assert command([*WORDS, "--warmup", "1"]) == 0
    out = capsys.readouterr().out
    for part in ("natural", "forced uniform", "tokens/s", "model TFLOP/s", "max/mean load 1.00"):
        assert part in out


def test_what_cannot_be_timed_is_refused(capsys) -> None:
    refused(capsys, command([*WORDS, "--measured", "0"]), "measured must be positive, got 0")
    refused(capsys, command([*WORDS, "--nproc", "3"]), "batch_size 4", "3 ranks")
    refused(capsys, command([*WORDS, "--mesh.ep", "2"]), "ep=2")


def test_random_sequences_are_functions_of_their_numbers() -> None:
    source = RandomSequences(300, 8)
    numbers = np.array([5, 7, 5])
    batch = source.batch(numbers)
    assert batch.inputs_BS.shape == (3, 8)
    assert batch.inputs_BS[0].tolist() == batch.inputs_BS[2].tolist()
    assert batch.inputs_BS[0].tolist() != batch.inputs_BS[1].tolist()
    assert batch.inputs_BS[:, 1:].tolist() == batch.targets_BS[:, :-1].tolist()
