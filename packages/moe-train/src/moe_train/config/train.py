"""The loop."""

from dataclasses import dataclass
from typing import Literal

from moe_train.config.rules import require, require_no_less_than_zero, require_positive

MAX_BATCH = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """The loop.

    Attributes:
        steps: Optimizer steps that one run adds.
        batch_size: Sequences of one optimizer step, over all ranks.
        microbatch_size: Sequences of one forward pass of one rank; 0 for all of the rank's.
        eval_first: Validate before the first step of a new run too.
        eval_every: Steps between validations; one more at the end of each run. 0 for only that.
        eval_sequences: Sequences of one validation, spread evenly over the held-out text.
        save_every: Steps between checkpoints; one more at the end of each run. 0 for only that.
        save_first: Steps after each start until a first checkpoint, so that a disk that takes
            none is found early; 0 for none.
        async_save: Write checkpoints in the background, from a copy in host memory.
        keep: Checkpoints that are kept.
        log_every: Steps between records in ``metrics.jsonl``.
        sample_bytes: Bytes of text generated at the end of a run; 0 for none.
        seed: Decides the initial weights.
        dtype: Of parameters and activations. The router is never narrower than float32.
        ema: Decay of an average of the weights that is kept beside them; 0 for none.
        eval_ema: Validate with that average too.
        skip_spikes: Skip a step whose loss is more than so many standard deviations above the mean
            of the last ones; 0 never does.
        spike_window: Losses whose mean and deviation that is.
        deterministic: Let torch use no operation whose result may differ from run to run.
        recompute: What backward computes again instead of keeping it. ``selective``: norms,
            rotations and the activations of dense networks, but no product of matrices;
            ``block``: each block from its input, but for the choice of experts.
        threads: Threads of one rank on the CPU; 0 for an equal share of the cores. A small model
            uses several cores better through several ranks.
        device: ``auto`` takes a GPU if there is one.
    """

    steps: int = 700
    batch_size: int = 8
    microbatch_size: int = 0
    eval_first: bool = False
    eval_every: int = 175
    eval_sequences: int = 256
    save_every: int = 175
    save_first: int = 10
    async_save: bool = True
    keep: int = 2
    log_every: int = 5
    sample_bytes: int = 300
    seed: int = 0
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    ema: float = 0.0
    eval_ema: bool = False
    skip_spikes: float = 0.0
    spike_window: int = 128
    deterministic: bool = False
    recompute: Literal["none", "selective", "block"] = "none"
    threads: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        require_positive(
            steps=self.steps, batch_size=self.batch_size, keep=self.keep,
            log_every=self.log_every, eval_sequences=self.eval_sequences,
            spike_window=self.spike_window,
        )  # fmt: skip
        require(
            self.batch_size <= MAX_BATCH,
            f"batch_size must be at most {MAX_BATCH}, got {self.batch_size}",
        )
        require_no_less_than_zero(
            microbatch_size=self.microbatch_size, eval_every=self.eval_every,
            save_every=self.save_every, sample_bytes=self.sample_bytes, threads=self.threads,
            save_first=self.save_first, skip_spikes=self.skip_spikes,
        )  # fmt: skip
        require(0 <= self.ema < 1, f"ema must be in [0, 1), got {self.ema}")
        require(
            self.ema > 0 or not self.eval_ema,
            "eval_ema validates with an average of the weights, and ema 0 keeps none",
        )
