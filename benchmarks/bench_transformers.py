"""Time OLMoE layers of Hugging Face transformers on its experts implementations and on ours.

One stack of decoder layers (attention, router, experts, norms; no embedding, no head), with the
same weights and tokens for every implementation, switched by ``set_experts_implementation``. Then
the experts of one layer alone, with its router's choices drawn at random. ``both_ms`` is forward
and backward with gradients of tokens and all parameters. Times are medians by events of the device,
over rounds in which the implementations take turns. ``saved_mib`` counts what autograd keeps for
backward beside parameters and tokens; ``peak_mib`` is the most that was allocated in a step, with
weights. ``ratio`` is the time of ``grouped_mm`` over that of the row; ``error`` the largest
difference of output and gradients from eager experts in float32, relative and in norm.

    python benchmarks/bench_transformers.py --out results.json
    python benchmarks/bench_transformers.py --layers 8 --implementations moe_kernels,grouped_mm
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import torch
from common import CUDA, DEVICE, experts, machine, milliseconds, write
from moe_kernels.integrations.transformers import register
from torch import Tensor
from transformers import AutoModel, OlmoeConfig

MIB = 2**20
OURS, PEER = "moe_kernels", "grouped_mm"
OLMOE = {"hidden_size": 2048, "intermediate_size": 1024, "num_experts": 64,
    "num_experts_per_tok": 8, "num_attention_heads": 16, "num_key_value_heads": 16}  # fmt: skip
SMALL = {"hidden_size": 64, "intermediate_size": 32, "num_experts": 8,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 4}  # fmt: skip


class Part:
    """A module, what goes through it, and what is differentiated."""

    def __init__(self, name: str, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.name, self.module = name, module
        self.leaves = [t for t in (*inputs, *module.parameters()) if t.requires_grad]
        self.inputs = inputs
        self.dy = torch.randn_like(inputs[0])

    def forward(self) -> Tensor:
        x, *routing = self.inputs
        if routing:
            return self.module(x, *routing)
        return self.module(inputs_embeds=x, use_cache=False).last_hidden_state

    def without_grad(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def both(self) -> tuple[Tensor, ...]:
        y = self.forward()
        # The embedding has no part in a stack.
        return y.detach(), *torch.autograd.grad(y, self.leaves, self.dy, materialize_grads=True)

    def saved_mib(self) -> float:
        """MiB that autograd keeps, each storage once."""
        given = {t.untyped_storage().data_ptr() for t in self.leaves}
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in given:
                kept[storage.data_ptr()] = storage
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            y = self.forward()
        del y
        return sum(storage.nbytes() for storage in kept.values()) / MIB

    def peak_mib(self) -> float:
        if not CUDA:
            return 0.0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.both()
        return torch.cuda.max_memory_allocated() / MIB


def parts(args: argparse.Namespace, sizes: dict[str, int]) -> Iterator[Part]:
    """Yield the stack, then the experts of its first layer."""
    torch.manual_seed(0)
    config = OlmoeConfig(
        **sizes, num_hidden_layers=args.layers, vocab_size=16, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, max_position_embeddings=args.sequence,
    )  # fmt: skip
    dtype = torch.bfloat16 if CUDA else torch.float32
    with torch.device(DEVICE):
        model = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa").train()
    D = config.hidden_size
    batch = args.tokens // args.sequence
    x_BSD = torch.randn(batch, args.sequence, D, device=DEVICE, dtype=dtype).requires_grad_()
    yield Part("stack", model, (x_BSD,))

    x_TD = torch.randn(args.tokens, D, device=DEVICE, dtype=dtype).requires_grad_()
    E, K = config.num_experts, config.num_experts_per_tok
    weight_TK = torch.rand(args.tokens, K, device=DEVICE).to(dtype).requires_grad_()
    expert_TK = experts("random", args.tokens, E, K).long()
    yield Part("experts", model.layers[0].mlp.experts, (x_TD, expert_TK, weight_TK))


def error_of(part: Part, want: list[Tensor]) -> float:
    pairs = zip(part.both(), want, strict=True)
    return max(((g.float() - w).norm() / w.norm()).item() for g, w in pairs)


def oracle(part: Part) -> list[Tensor]:
    """Output and gradients of the experts in float32, on the same rounded weights and tokens."""
    dtype = part.inputs[0].dtype
    x, expert_TK, weight_TK = part.inputs
    wide = (
        x.detach().float().requires_grad_(), expert_TK, weight_TK.detach().float().requires_grad_(),
    )  # fmt: skip
    twin = Part("oracle", part.module.float(), wide)
    twin.dy = part.dy.float()
    twin.module.config._experts_implementation = "eager"
    want = [t.float() for t in twin.both()]
    part.module.to(dtype)
    part.leaves = [t for t in (*part.inputs, *part.module.parameters()) if t.requires_grad]
    return want


def times(
    part: Part, names: list[str], args: argparse.Namespace, failed: dict[str, str]
) -> dict[str, tuple[float, float]]:
    """Return the median milliseconds forward, and forward and backward, of each implementation."""
    seen: dict[str, list[list[float]]] = {name: [[], []] for name in names}
    for _ in range(args.rounds):
        for name in names:
            if name in failed:
                continue
            part.module.config._experts_implementation = name
            calls: tuple[Callable[[], object], ...] = (part.without_grad, part.both)
            try:
                for values, call in zip(seen[name], calls, strict=True):
                    values.append(milliseconds(call, args.repeat))
            except torch.OutOfMemoryError as error:
                failed[name] = str(error).partition(".")[0]
    return {
        name: (statistics.median(forward), statistics.median(both))
        for name, (forward, both) in seen.items()
        if name not in failed
    }


def measure(part: Part, names: list[str], args: argparse.Namespace) -> Iterator[dict]:
    """Yield a row for each implementation."""
    failed: dict[str, str] = {}
    measured = times(part, names, args, failed)
    want = oracle(part) if part.name == "experts" else None
    for name in names:
        row = {"part": part.name, "what": name, "layers": args.layers, "tokens": args.tokens}
        if name in failed:
            yield {**row, "error": failed[name]}
            continue
        forward, both = measured[name]
        part.module.config._experts_implementation = name
        row |= {
            "forward_ms": round(forward, 3), "both_ms": round(both, 3),
            "tokens_per_s": round(args.tokens / both * 1e3),
            "saved_mib": round(part.saved_mib(), 2), "peak_mib": round(part.peak_mib(), 1),
        }  # fmt: skip
        if PEER in measured:
            row["forward_ratio"] = round(measured[PEER][0] / forward, 3)
            row["ratio"] = round(measured[PEER][1] / both, 3)
        if want is not None:
            row["error"] = round(error_of(part, want), 6)
        yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--implementations", default=f"{OURS},{PEER},eager")
    parser.add_argument("--repeat", type=int, default=7, help="calls in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="two small layers, once")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    args = parser.parse_args()
    sizes = OLMOE
    if args.smoke:
        sizes, args.layers, args.tokens, args.sequence, args.repeat, args.rounds = (
            SMALL, 2, 64, 32, 1, 1,
        )  # fmt: skip
    if args.tokens % args.sequence:
        parser.error(f"--tokens {args.tokens} must be a multiple of --sequence {args.sequence}")
    register()
    where = {**machine(), "transformers": version("transformers")}
    print(json.dumps(where), flush=True)
    rows = []
    for part in parts(args, sizes):
        for row in measure(part, args.implementations.split(","), args):
            print(json.dumps(row), flush=True)
            rows.append(row)
    write(rows, where, args.out)


if __name__ == "__main__":
    main()
