"""What a setting is for: the mathematics of the run, how fast it goes, or what is seen of it.

Two runs that differ only in what is not mathematics compute the same losses but for rounding.
What is not named here is mathematics, so a new setting is never taken for harmless by mistake.
"""

from dataclasses import fields
from typing import Literal

from moe_train.config.log import LogConfig

Kind = Literal["mathematics", "speed", "observation"]

_SPEED = {
    "nproc",
    "mesh.ep",
    "mesh.pp",
    "mesh.nvlink_domain",
    "data.prefetch",
    "mesh.overlap",
    "mesh.dispatcher",
    "mesh.overflow",
    "mesh.capacity_factor",
    "train.async_save",
    "train.deterministic",
    "train.microbatch_size",
    "train.recompute",
    "train.threads",
    "train.device",
}
_OBSERVATION = {
    "run_dir",
    "data.allow_changed",
    "train.ema",
    "train.eval_ema",
    "train.eval_first",
    "train.eval_every",
    "train.eval_sequences",
    "train.save_every",
    "train.save_first",
    "train.keep",
    "train.log_every",
    "train.sample_bytes",
    *(f"log.{field.name}" for field in fields(LogConfig)),
}
EFFECTS = {
    "mathematics": "changes what is computed",
    "speed": "changes time and memory, and results by rounding alone",
    "observation": "changes what is seen and kept, not what is computed",
}


def kind_of(key: str) -> Kind:
    """Return what a setting is for, by its dotted name."""
    if key in _SPEED:
        return "speed"
    return "observation" if key in _OBSERVATION else "mathematics"


def harmless() -> set[str]:
    """Return the settings that are not mathematics."""
    return _SPEED | _OBSERVATION
