"""A setting that differs from the checkpoint's is refused, asked for, or said; never silent."""

import re
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from moe_train.checkpoints import portable
from moe_train.config import OptimizerConfig, RunConfig, TrainConfig
from moe_train.errors import RunError
from moe_train.resume import check_continuation, first_target, target_step

CONFIG = RunConfig()
SETTINGS = [
    f"{section.name}.{field.name}"
    for section in fields(RunConfig)
    if is_dataclass(getattr(CONFIG, section.name))
    for field in fields(getattr(CONFIG, section.name))
]
REFUSED = (
    "model.", "routing.bias:", "routing.balance_over:", "train.dtype:", "optimizer.rule:",
)  # fmt: skip
SILENT = ("data.allow_changed:",)


DIGEST = "a" * 64


def state_of(config: RunConfig, **counters) -> dict:
    return {
        "config": portable(config), "corpus": {"digest": DIGEST}, "steps_done": 4,
        "samples_seen": 32, "target": 6, "first_target": 6, **counters,
    }  # fmt: skip


def test_nothing_is_said_of_what_has_not_changed() -> None:
    assert check_continuation(state_of(CONFIG), CONFIG, DIGEST) == []


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_that_differs_is_refused_asked_for_or_said(name) -> None:
    section, key = name.split(".")
    state = state_of(CONFIG)
    value = state["config"][section][key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    other = value + 1 if number else ("cosine" if key == "schedule" else "another")
    state["config"][section][key] = other
    line = f"{name}: {other!r} -> {value!r}"
    if line.startswith(REFUSED):
        with pytest.raises(RunError, match="is of another model"):
            check_continuation(state, CONFIG, DIGEST)
        return
    if line.startswith(("data.sequence_length:", "data.seed:", "data.packing:")):
        with pytest.raises(RunError, match=f"the text is not the one.*{re.escape(line)}"):
            check_continuation(state, CONFIG, DIGEST)
    asked = replace(CONFIG, data=replace(CONFIG.data, allow_changed=True))
    said = check_continuation(state, asked, DIGEST)
    assert (line in said) != line.startswith(SILENT)


def test_a_setting_that_an_earlier_version_did_not_have_counts_as_its_default() -> None:
    state = state_of(CONFIG)
    del state["config"]["train"]["ema"], state["config"]["model"]["qk_norm"], state["first_target"]
    assert check_continuation(state, CONFIG, DIGEST) == []
    changed = replace(CONFIG, train=replace(CONFIG.train, ema=0.5))
    assert "train.ema: 0.0 -> 0.5" in check_continuation(state, changed, DIGEST)


def test_another_batch_size_is_said_with_what_stays() -> None:
    changed = replace(CONFIG, train=TrainConfig(batch_size=16))
    [_, line] = check_continuation(state_of(CONFIG), changed, DIGEST)
    assert line == (
        "the data go on after sequence 32, 16 at a step; warm-up and schedule still count steps"
    )


def test_other_steps_are_said_not_to_move_the_end_of_an_interrupted_start() -> None:
    changed = replace(CONFIG, train=TrainConfig(steps=9))
    [_, line] = check_continuation(state_of(CONFIG), changed, DIGEST)
    assert line.startswith("this start goes on to step 6, where the one that was interrupted")
    ended = state_of(CONFIG, steps_done=6)
    assert len(check_continuation(ended, changed, DIGEST)) == 1


def test_another_rate_is_said_with_both() -> None:
    changed = replace(CONFIG, optimizer=OptimizerConfig(lr=0.03))
    lines = check_continuation(state_of(CONFIG), changed, DIGEST)
    assert "the rate of the next step is 0.005, it was to be 0.0005" in lines


def test_a_batch_that_grows_at_a_restart_repeats_and_skips_no_sequence(
    tiny_config, trainer_of
) -> None:
    first = trainer_of(tiny_config)
    seen = []
    for _ in range(2):
        seen += list(first._request().numbers())
        first.step()
    second = trainer_of(replace(tiny_config, train=replace(tiny_config.train, batch_size=12)))
    second.loaded(**{k: first.counters()[k] for k in ("steps_done", "samples_seen", "step_count")})
    seen += list(second._request().numbers())
    whole = trainer_of(replace(tiny_config, train=replace(tiny_config.train, batch_size=28)))
    assert np.array_equal(seen, whole._request().numbers())


def test_an_interrupted_start_goes_on_to_its_end_and_an_ended_one_adds_steps() -> None:
    assert target_step(None, 5) == 5
    assert target_step({"steps_done": 4, "target": 6}, 5) == 6
    assert target_step({"steps_done": 6, "target": 6}, 5) == 11


def test_the_state_says_where_the_run_folder_is_nowhere() -> None:
    assert "run_dir" not in portable(replace(CONFIG, run_dir=Path("elsewhere"), nproc=2))


def test_the_schedule_of_a_run_that_was_only_imported_is_planned_by_its_first_start() -> None:
    imported = state_of(CONFIG, steps_done=0, target=0, first_target=0)
    assert first_target(imported, 40) == first_target(None, 40) == 40
    assert first_target(state_of(CONFIG, steps_done=6), 40) == 6
