"""Continuing a run: find its state, refuse what would be wrong, say what is different.

Changes fall into three kinds. Another model, number format or rule of the optimizer cannot take the
state at all. Other text, or text cut or ordered otherwise, can, but then the past of the run is not
what its checkpoint says, so it has to be asked for. Everything else is allowed and said.
"""

import contextlib
from collections.abc import Mapping
from typing import Any

from moe_ckpt import find_latest, open_checkpoint

from moe_train.checkpoints import portable
from moe_train.config import OptimizerConfig, RunConfig
from moe_train.errors import RunError
from moe_train.folder import RunFolder
from moe_train.load_config import ConfigError, diff_configs, from_dict, to_dict
from moe_train.schedule import learning_rate, planned_total

_FIXED = (
    "model.", "routing.bias:", "routing.balance_over:", "train.dtype:", "optimizer.rule:",
)  # fmt: skip
_TEXT = ("data.sequence_length:", "data.seed:", "data.packing:")
_SOURCES = ("data.path:", "data.sources:", "data.tokenizer:", "data.eos:")
_SILENT = ("data.allow_changed:",)


def find_state(folder: RunFolder) -> dict[str, Any] | None:
    """Return the state of the newest checkpoint, or None if the run has none yet.

    Raises:
        RunError: If checkpoints were saved here and none is usable.
    """
    found = find_latest(folder.checkpoints) if folder.checkpoints.is_dir() else None
    if found is not None:
        return dict(open_checkpoint(found.path).state)
    saved = folder.saved_steps()
    left = sorted(path.name for path in folder.checkpoints.glob("*") if _is_evidence(path.name))
    if not saved and not left:
        return None
    raise RunError(
        f"{folder.root} has saved steps {saved or left}, and no valid checkpoint is left in "
        f"{folder.checkpoints} (found there: {left or 'nothing'}). To begin a new run, set "
        "run_dir to another folder or remove this one"
    )


def _is_evidence(name: str) -> bool:
    """Tell whether a file shows that something was once committed."""
    return name == "LATEST" or name.startswith("step-")


def check_continuation(state: Mapping[str, Any], config: RunConfig, digest: str) -> list[str]:
    """Return one line for each setting that differs from the checkpoint's.

    Raises:
        RunError: If the run cannot be continued with these settings or this text.
    """
    before = _with_defaults(state["config"])
    changes = diff_configs(before, portable(config))
    changes = [line for line in changes if not line.startswith(_SILENT)]
    if fixed := [line for line in changes if line.startswith(_FIXED)]:
        raise RunError(
            f"the checkpoint in {config.run_dir} is of another model or optimizer "
            f"({'; '.join(fixed)}). Use its settings, or set run_dir to begin another run"
        )
    text = [line for line in changes if line.startswith(_TEXT)]
    read, now = state["corpus"]["digest"], digest
    if read != now:
        text += [line for line in changes if line.startswith(_SOURCES)]
        text.append(f"SHA-256 {read[:12]}… -> {now[:12]}…")
    if text and not config.data.allow_changed:
        raise RunError(
            f"the text is not the one that the run in {config.run_dir} was trained on "
            f"({'; '.join(text)}). To go on all the same, add --data.allow-changed True; to begin "
            "another run, set run_dir"
        )
    return (
        changes
        + [line for line in text if line not in changes]
        + _consequences(state, before, config)
    )


def _with_defaults(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Fill up settings that an earlier version did not have with what they stand for."""
    defaults = portable(RunConfig())
    return dict(saved) | {
        section: {**defaults[section], **saved.get(section, {})}
        if isinstance(defaults[section], dict)
        else saved.get(section, defaults[section])
        for section in defaults
    }


def _consequences(
    state: Mapping[str, Any], before: Mapping[str, Any], config: RunConfig
) -> list[str]:
    """Say what changed settings mean where they do not say it themselves."""
    step, lines = state["steps_done"], []
    old_train, train = before["train"], config.train
    if old_train["batch_size"] != train.batch_size:
        lines.append(
            f"the data go on after sequence {state['samples_seen']}, {train.batch_size} at a step; "
            "warm-up and schedule still count steps"
        )
    if old_train["steps"] != train.steps and step < state["target"]:
        lines.append(
            f"this start goes on to step {state['target']}, where the one that was interrupted was "
            f"to end; the next one adds {train.steps}"
        )
    if train.ema and not old_train["ema"]:
        lines.append(f"the average of the weights begins from those of step {step}")
    if old_train["ema"] and not train.ema:
        lines.append("the average of the weights is given up")
    first = first_target(state, config.train.steps)
    return lines + _rates(step, first, before["optimizer"], config.optimizer)


def _rates(step: int, first: int, before: Mapping[str, Any], config: OptimizerConfig) -> list[str]:
    """Say how the rate of the next step differs from what it was to be, and if it is at its end."""
    lines, total = [], planned_total(config, first)
    rate = learning_rate(config, step, total)
    known = {key: value for key, value in before.items() if key in to_dict(config)}
    with contextlib.suppress(ConfigError):  # settings of a version with other rules
        old = from_dict(OptimizerConfig, known)
        was = learning_rate(old, step, planned_total(old, first))
        if was != rate:
            lines.append(f"the rate of the next step is {rate:g}, it was to be {was:g}")
    if config.schedule != "constant" and step >= total:
        lines.append(
            f"the schedule ended at step {total}: the rate stays at {rate:g}; "
            "--optimizer.total-steps plans a longer one"
        )
    return lines


def first_target(state: Mapping[str, Any] | None, steps: int) -> int:
    """Return the step at which the first start of the run was to end.

    Args:
        state: Of the checkpoint; None, or one that says 0, if this is the first start.
        steps: What this start adds.
    """
    return steps if state is None else state.get("first_target", state["target"]) or steps


def target_step(state: Mapping[str, Any] | None, steps: int) -> int:
    """Return the step at which this start ends.

    A run that was interrupted goes on to its own end; one that had ended gets ``steps`` more.
    """
    if state is None:
        return steps
    done, target = state["steps_done"], state["target"]
    return target if done < target else done + steps
