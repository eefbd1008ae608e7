"""Every setting is checked when it is made, and every setting does something."""

import ast
import dataclasses
from pathlib import Path

import moe_train
import pytest
from moe_train import config
from moe_train.config import MeshConfig, ModelConfig, RunConfig, TrainConfig
from moe_train.errors import RunError

SECTIONS = [c for c in vars(config).values() if dataclasses.is_dataclass(c)]
FIELDS = [(c.__name__, f.name) for c in SECTIONS for f in dataclasses.fields(c)]


def test_every_setting_is_read_outside_its_definition() -> None:
    source = Path(moe_train.__file__).parent
    files = [path for path in source.rglob("*.py") if path.name != "config.py"]
    trees = [ast.parse(path.read_text()) for path in files]
    read = {node.attr for t in trees for node in ast.walk(t) if isinstance(node, ast.Attribute)}
    refused = {"tp", "cp"}  # they exist so that asking for them is refused by name
    dead = [f"{section}.{name}" for section, name in FIELDS if name not in read | refused]
    assert not dead


def test_every_setting_is_documented() -> None:
    missing = [
        f"{c.__name__}.{f.name}"
        for c in SECTIONS
        for f in dataclasses.fields(c)
        if f"        {f.name}: " not in (c.__doc__ or "")
    ]
    assert not missing


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (ModelConfig, {"top_k": 9}, r"top_k must be in 1..num_experts \(8\), got 9"),
        (ModelConfig, {"top_k": 0}, r"top_k must be in 1..num_experts \(8\), got 0"),
        (ModelConfig, {"num_kv_heads": 3}, r"num_kv_heads \(3\) must divide num_heads \(4\)"),
        (ModelConfig, {"dim": 100}, "even multiple of num_heads, got 100 and 4"),
        (ModelConfig, {"num_layers": 0}, "num_layers must be positive, got 0"),
        (MeshConfig, {"tp": 2}, "tp=2: the trainer has no tensor parallelism"),
        (MeshConfig, {"cp": 2}, "cp=2: the trainer has no context parallelism"),
        (MeshConfig, {"pp": 2}, "pp=2: the trainer has no pipeline parallelism"),
        (MeshConfig, {"ep": 0}, "ep must be positive, got 0"),
        (TrainConfig, {"steps": 0}, "steps must be positive, got 0"),
        (TrainConfig, {"save_every": -1}, "save_every must not be negative, got -1"),
    ],
)
def test_impossible_settings_are_refused(section, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        section(**settings)


def test_batch_that_ranks_cannot_divide_names_the_usable_ranks() -> None:
    run = RunConfig(train=TrainConfig(batch_size=6, microbatch_size=2))
    with pytest.raises(RunError, match=r"batch_size 6 .* 4 ranks; usable ranks: \[1, 2, 3, 6\]"):
        run.check_batch(4)
    with pytest.raises(RunError, match="microbatch_size 2 does not divide the 3 sequences"):
        run.check_batch(2)
    run.check_batch(3)
