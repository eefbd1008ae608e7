"""Continuing a run: find its state, refuse what would be wrong, say what is different.

Changes fall into three kinds. Another model or another number format cannot take the state at all.
Other text, or text cut or ordered otherwise, can, but then the past of the run is not what its
checkpoint says, so it has to be asked for. Everything else is allowed and said.
"""

from collections.abc import Mapping
from typing import Any

from moe_ckpt import find_latest, open_checkpoint

from moe_train.checkpoints import portable
from moe_train.config import RunConfig
from moe_train.errors import RunError
from moe_train.folder import RunFolder
from moe_train.load_config import diff_configs

_FIXED = ("model.", "routing.bias:", "routing.balance_over:", "train.dtype:")
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
    changes = diff_configs(state["config"], portable(config))
    changes = [line for line in changes if not line.startswith(_SILENT)]
    if fixed := [line for line in changes if line.startswith(_FIXED)]:
        raise RunError(
            f"the checkpoint in {config.run_dir} is of another model ({'; '.join(fixed)}). Use "
            "its settings, or set run_dir to begin another run"
        )
    text = [line for line in changes if line.startswith(_TEXT)]
    before, now = state["corpus"]["digest"], digest
    if before != now:
        text += [line for line in changes if line.startswith(_SOURCES)]
        text.append(f"SHA-256 {before[:12]}… -> {now[:12]}…")
    if text and not config.data.allow_changed:
        raise RunError(
            f"the text is not the one that the run in {config.run_dir} was trained on "
            f"({'; '.join(text)}). To go on all the same, add --data.allow-changed True; to begin "
            "another run, set run_dir"
        )
    return changes + [line for line in text if line not in changes]


def target_step(state: Mapping[str, Any] | None, steps: int) -> int:
    """Return the step at which this start ends.

    A run that was interrupted goes on to its own end; one that had ended gets ``steps`` more.
    """
    if state is None:
        return steps
    done, target = state["steps_done"], state["target"]
    return target if done < target else done + steps
