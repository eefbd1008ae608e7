"""A preset stands above the defaults and below files and flags, wherever it is written."""

import pytest
from moe_train.config import RunConfig
from moe_train.load_config import ConfigError, Layer, load, load_with_sources, preset_names


@pytest.fixture
def presets(tmp_path, monkeypatch):
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "small.toml").write_text("[model]\ndim = 64\nnum_layers = 2\n[routing]\nz = 0.5\n")
    (folder / "wide.toml").write_text("[model]\ndim = 256\n")
    (folder / "wrong.toml").write_text("[model]\nwidth = 256\n")
    monkeypatch.setattr(load, "PRESETS", folder)
    return folder


def loaded(*argv: str, base=()):
    return load_with_sources(RunConfig, list(argv), prog="run", description="", base=base)


def test_each_source_overrides_those_before_it_and_is_named(presets, tmp_path) -> None:
    file = tmp_path / "a.toml"
    file.write_text("[model]\nnum_layers = 5\nnum_experts = 16\n")
    base = [Layer("the base", {"model": {"top_k": 1, "dim": 32}})]
    words = ["--model.num-experts", "32", "--config", str(file), "--preset", "small"]
    config, sources = loaded(*words, base=base)
    model = config.model
    assert (model.dim, model.num_layers, model.num_experts, model.top_k) == (64, 5, 32, 1)
    assert config.routing.z == 0.5
    assert sources["model.top_k"] == "the base"
    assert sources["model.dim"] == sources["routing.z"] == "preset small"
    assert sources["model.num_layers"] == str(file)
    assert sources["model.num_experts"] == "--model.num-experts"
    assert sources["model.num_heads"] == "default"


def test_of_two_presets_the_last_counts_alone(presets) -> None:
    config = loaded("--preset", "small", "--preset", "wide").config
    assert (config.model.dim, config.model.num_layers) == (256, RunConfig().model.num_layers)
    assert preset_names() == ["small", "wide", "wrong"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--preset", "smal"], r"unknown preset 'smal'; nearest: small"),
        (["--preset", "../small"], "unknown preset"),
        (["--preset"], "--preset takes one name, got nothing"),
        (["--preset", "small", "wide"], "--preset takes one name, got small wide"),
        (["--preset", "wrong"], r"preset wrong: unknown key model.width"),
        (["--presett", "small"], "unknown option --presett; nearest: --preset"),
    ],
)
def test_a_preset_that_cannot_be_used_is_refused(presets, words, message) -> None:
    with pytest.raises(ConfigError, match=message):
        loaded(*words)


def test_every_preset_of_the_package_makes_a_configuration() -> None:
    for name in preset_names():
        config, sources = loaded("--preset", name)
        assert f"preset {name}" in sources.values()
        assert (config.model == RunConfig().model) == (name == "tiny")
