"""What a run is made of: one frozen class for each concern, checked when it is made."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from moe_train.errors import RunError

NUM_BYTES = 256
MAX_BATCH = 1 << 20


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _require_positive(**values: float) -> None:
    for name, value in values.items():
        _require(value > 0 and _is_finite(value), f"{name} must be positive, got {value}")


def _require_no_less_than_zero(**values: float) -> None:
    for name, value in values.items():
        _require(value >= 0 and _is_finite(value), f"{name} must be 0 or more, got {value}")


def _is_text(name: str) -> bool:
    return name.encode(errors="surrogateescape") == name.encode(errors="replace")


def _is_finite(value: float) -> bool:
    return -1e18 < value < 1e18  # beyond, whole numbers no longer fit into 64 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The shape of the transformer.

    Attributes:
        vocab_size: V. 256 for bytes.
        dim: D, width of the residual stream.
        num_layers: Transformer blocks, each of attention and experts.
        num_heads: Query heads; a head is ``dim / num_heads`` wide, an even number.
        num_kv_heads: Key and value heads, each shared by ``num_heads / num_kv_heads`` query heads.
        num_experts: E, experts of each block.
        top_k: K, experts that each token visits.
        expert_dim: F, hidden width of one expert.
        shared_dim: Hidden width of the expert that every token visits; 0 for none.
        qk_norm: Normalise queries and keys of each head before they are rotated.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in RMSNorm.
    """

    vocab_size: int = 256
    dim: int = 128
    num_layers: int = 3
    num_heads: int = 4
    num_kv_heads: int = 2
    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 128
    shared_dim: int = 128
    qk_norm: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        _require_positive(
            vocab_size=self.vocab_size, dim=self.dim, num_layers=self.num_layers,
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            num_experts=self.num_experts, expert_dim=self.expert_dim,
            rope_theta=self.rope_theta, norm_eps=self.norm_eps,
        )  # fmt: skip
        _require(
            self.dim % (2 * self.num_heads) == 0,
            f"dim must be an even multiple of num_heads, got {self.dim} and {self.num_heads}",
        )
        _require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads ({self.num_kv_heads}) must divide num_heads ({self.num_heads})",
        )
        _require(
            1 <= self.top_k <= self.num_experts,
            f"top_k must be in 1..num_experts ({self.num_experts}), got {self.top_k}",
        )
        _require_no_less_than_zero(shared_dim=self.shared_dim)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingConfig:
    """How tokens choose experts and what keeps the load even.

    Attributes:
        score: How logits become scores.
        renormalize: Whether the weights of a token's K experts are made to sum to one.
        balance: Weight of the balance loss, taken over each sequence.
        z: Weight of the z-loss, the mean squared log-partition of the router.
        bias: Whether a selection bias keeps the load even (loss-free balancing).
        bias_rate: Step of that bias after each optimizer step; 0 leaves it as it has become.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    renormalize: bool = True
    balance: float = 0.01
    z: float = 0.0
    bias: bool = False
    bias_rate: float = 0.001

    def __post_init__(self) -> None:
        _require_no_less_than_zero(balance=self.balance, z=self.z, bias_rate=self.bias_rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text comes from and how it is cut.

    Attributes:
        path: A folder of text files; without it, the sources of Python's standard library.
        suffix: Which files of the folder are read, by the end of their name.
        sequence_length: Bytes that are predicted in one sequence.
        seed: Decides the order of the sequences.
        allow_changed: Go on from a checkpoint though the text is not the one it was trained on.
    """

    path: Path | None = None
    suffix: str = ".py"
    sequence_length: int = 128
    seed: int = 0
    allow_changed: bool = False

    def __post_init__(self) -> None:
        _require_positive(sequence_length=self.sequence_length)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshConfig:
    """How the ranks divide the work.

    Attributes:
        ep: Ranks that divide the experts of a block among them.
        pp: Pipeline stages; 1 in this version.
        tp: Tensor parallelism, which this version does not have; only 1.
        cp: Context parallelism, which this version does not have; only 1.
        nvlink_domain: GPUs that reach each other over NVLink; expert parallelism stays inside.
    """

    ep: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1
    nvlink_domain: int = 8

    def __post_init__(self) -> None:
        _require_positive(ep=self.ep, pp=self.pp, nvlink_domain=self.nvlink_domain)
        for name, what in (("tp", "tensor"), ("cp", "context"), ("pp", "pipeline")):
            value = getattr(self, name)
            _require(value == 1, f"{name}={value}: the trainer has no {what} parallelism, use 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW and its schedule: linear warm-up, then a constant rate, so that runs can be extended.

    Attributes:
        lr: The rate after warm-up.
        warmup_steps: Steps over which the rate rises from zero.
        beta1: Decay of the first moment.
        beta2: Decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay of matrices; vectors and the router are not decayed.
        max_norm: Gradients are scaled down to this global norm; 0 for no limit.
    """

    lr: float = 3e-3
    warmup_steps: int = 30
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(lr=self.lr, eps=self.eps)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _require(0 <= value < 1, f"{name} must be in [0, 1), got {value}")
        _require_no_less_than_zero(
            warmup_steps=self.warmup_steps, weight_decay=self.weight_decay, max_norm=self.max_norm
        )


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
        recompute: Keep only the inputs of each block and compute the block again in backward.
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
    recompute: bool = False
    threads: int = 1
    device: Literal["auto", "cpu", "cuda"] = "auto"

    def __post_init__(self) -> None:
        _require_positive(
            steps=self.steps, batch_size=self.batch_size, keep=self.keep,
            log_every=self.log_every, eval_sequences=self.eval_sequences,
        )  # fmt: skip
        _require(
            self.batch_size <= MAX_BATCH,
            f"batch_size must be at most {MAX_BATCH}, got {self.batch_size}",
        )
        _require_no_less_than_zero(
            microbatch_size=self.microbatch_size, eval_every=self.eval_every,
            save_every=self.save_every, sample_bytes=self.sample_bytes, threads=self.threads,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """Everything about a run.

    Attributes:
        run_dir: Where checkpoints, metrics and the report are. A run found there is continued.
        nproc: Ranks to start on this machine; 1 runs in this process.
        model: The shape of the transformer.
        routing: How tokens choose experts.
        data: The text.
        mesh: How the ranks divide the work.
        optimizer: AdamW and its schedule.
        train: The loop.
    """

    run_dir: Path = Path("runs/main")
    nproc: int = 1
    model: ModelConfig = field(default_factory=ModelConfig)
    routing: RoutingConfig = field(default_factory=RoutingConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        _require_positive(nproc=self.nproc)
        for name, path in (("run_dir", self.run_dir), ("data.path", self.data.path)):
            _require(
                path is None or _is_text(str(path)),
                f"{name} {str(path)!r} is not UTF-8, as files that name it must be",
            )
        _require(
            self.model.vocab_size >= NUM_BYTES,
            f"model.vocab_size must be at least {NUM_BYTES}, as text is read as bytes, got "
            f"{self.model.vocab_size}",
        )

    def check_batch(self, dp: int) -> None:
        """Raise unless ``dp`` ranks can divide the batch.

        Raises:
            RunError: If a rank's share is not a whole number of microbatches.
        """
        batch, micro = self.train.batch_size, self.train.microbatch_size
        if batch % dp:
            usable = [d for d in range(1, min(batch, 1024) + 1) if batch % d == 0]
            raise RunError(
                f"train.batch_size {batch} cannot be divided among {dp} ranks; usable ranks: "
                f"{usable}"
            )
        if micro and (batch // dp) % micro:
            raise RunError(
                f"train.microbatch_size {micro} does not divide the {batch // dp} sequences of a "
                "rank"
            )
