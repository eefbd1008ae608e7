"""FLOPs a second follow from tokens a second; a share of a peak needs a peak."""

from dataclasses import replace

import pytest
import torch
from moe_train.flops import train_flops_per_token
from moe_train.metrics import read_metrics
from moe_train.utilisation import Utilisation, peak_flops
from runs import run

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_flops_are_tokens_times_the_flops_of_a_token_shared_by_the_devices(tiny_config) -> None:
    per_token = train_flops_per_token(tiny_config.model, 16)
    for devices in (1, 4):
        rate = Utilisation(tiny_config, CPU, devices).of(2e6)
        assert rate == {"tflops": pytest.approx(2e6 * per_token / devices / 1e12, rel=1e-5)}


def test_nothing_is_said_where_attention_depends_on_the_lengths_of_documents(tiny_config) -> None:
    packed = replace(tiny_config, data=replace(tiny_config.data, packing="documents"))
    assert Utilisation(packed, CPU, 1).of(2e6) == {}


def test_a_known_device_gives_a_share_of_its_peak_in_bfloat16_alone(
    tiny_config, monkeypatch
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "NVIDIA H200")
    half = replace(tiny_config, train=replace(tiny_config.train, dtype="bfloat16"))
    rate = Utilisation(half, GPU, 1).of(1e9)
    assert rate["mfu"] == pytest.approx(rate["tflops"] / 989.4, rel=1e-5)
    assert "mfu" not in Utilisation(tiny_config, GPU, 1).of(1e9)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "some other device")
    assert "mfu" not in Utilisation(half, GPU, 1).of(1e9)


def test_the_longest_name_counts() -> None:
    assert peak_flops("NVIDIA GH200 480GB", "bfloat16") == 989.4e12
    assert peak_flops("NVIDIA GB200", "bfloat16") == 2500e12
    assert peak_flops("NVIDIA B200", "bfloat16") == 2250e12


def test_every_record_of_a_run_has_its_flops_and_on_a_processor_no_share(
    tmp_path, text_folder, monkeypatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert run(tmp_path / "a", text_folder, train__steps=2) == 0
    for record in read_metrics(tmp_path / "a" / "metrics.jsonl"):
        if record["kind"] == "train":
            assert 0 < record["tflops"] < 1
            assert record["tflops"] / record["tokens_per_second"] > 0
            assert "mfu" not in record
