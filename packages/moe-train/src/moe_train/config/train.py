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
        eval_every: Steps between validations; one more at the end of each run. 0 for only that.
        eval_sequences: Sequences of one validation, spread evenly over the held-out text.
        save_every: Steps between checkpoints; one more at the end of each run. 0 for only that.
        keep: Checkpoints that are kept.
        log_every: Steps between records in ``metrics.jsonl``.
        sample_bytes: Bytes of text generated at the end of a run; 0 for none.
        seed: Decides the initial weights.
        dtype: Of parameters and activations. The router is never narrower than float32.
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
    eval_every: int = 175
    eval_sequences: int = 256
    save_every: int = 175
    keep: int = 2
    log_every: int = 5
    sample_bytes: int = 300
    seed: int = 0
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    recompute: Literal["none", "selective", "block"] = "none"
    threads: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        require_positive(
            steps=self.steps, batch_size=self.batch_size, keep=self.keep,
            log_every=self.log_every, eval_sequences=self.eval_sequences,
        )  # fmt: skip
        require(
            self.batch_size <= MAX_BATCH,
            f"batch_size must be at most {MAX_BATCH}, got {self.batch_size}",
        )
        require_no_less_than_zero(
            microbatch_size=self.microbatch_size, eval_every=self.eval_every,
            save_every=self.save_every, sample_bytes=self.sample_bytes, threads=self.threads,
        )  # fmt: skip
