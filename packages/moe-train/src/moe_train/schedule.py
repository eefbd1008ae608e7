"""The learning rate of every step: warm-up, then as the schedule says.

A rate is a function of the step, the settings and the planned total alone, so a continued run has
the rates of an undisturbed one. The planned total is ``optimizer.total_steps``; where that is 0,
it is the step at which the first start of the run was to end, which checkpoints keep. What a
later start adds to ``train.steps`` therefore never bends the curve: past its end the rate stays at
the floor. Steps count optimizer steps, skipped ones included, whatever the batch size is::

    rate                     wsd: stable, then down over the last `decay_steps`
      |    .-----------.     cosine, linear: the same with `decay_steps` of all after warm-up
      |   /             \
      |  /               `---- floor * lr
      | /
      +-------------------------- step
        warm-up        total
"""

import math

from moe_train.config import OptimizerConfig
from moe_train.errors import RunError

WSD_FRACTION = 0.2
"""Part of the planned total over which ``wsd`` decays if ``decay_steps`` is 0."""


def learning_rate(config: OptimizerConfig, step: int, total: int) -> float:
    """Return the rate of a step.

    Args:
        config: The schedule.
        step: Counted from 0.
        total: Step at which the schedule has reached its floor. ``constant`` does not look at it.

    Examples:
        >>> wsd = OptimizerConfig(lr=1.0, warmup_steps=2, schedule="wsd", decay_steps=2, floor=0.5)
        >>> [learning_rate(wsd, step, total=6) for step in range(8)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.5]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    length = decay_steps(config, total)
    gone = min(1.0, max(0.0, (step - (total - length)) / length))
    left = (1 + math.cos(math.pi * gone)) / 2 if config.schedule == "cosine" else 1 - gone
    return config.lr * (config.floor + (1 - config.floor) * left)


def decay_steps(config: OptimizerConfig, total: int) -> int:
    """Return over how many steps, up to ``total``, the rate falls."""
    room = total - config.warmup_steps
    if config.decay_steps:
        return config.decay_steps
    return min(room, max(1, round(WSD_FRACTION * total))) if config.schedule == "wsd" else room


def check_schedule(config: OptimizerConfig, total: int) -> None:
    """Raise unless warm-up and decay fit into the planned total.

    Raises:
        RunError: With the numbers, if they do not.
    """
    needed = config.warmup_steps + max(1, config.decay_steps)
    if config.schedule != "constant" and needed > total:
        raise RunError(
            f"optimizer.schedule {config.schedule!r} is planned over {total} steps, and "
            f"warmup_steps {config.warmup_steps} and decay_steps {max(1, config.decay_steps)} need "
            f"{needed}: set optimizer.total_steps, or shorten them"
        )


def planned_total(config: OptimizerConfig, first_target: int) -> int:
    """Return the step at which the schedule ends.

    Args:
        config: The schedule.
        first_target: Step at which the first start of the run was to end.
    """
    return config.total_steps or first_target
