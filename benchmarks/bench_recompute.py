"""Memory that a forward keeps, and time of forward and backward, for each way to recompute.

Four blocks of attention and experts. ``selective`` computes again what is cheap for what it keeps:
both norms, and the expert MLP up to the input of its down projection. ``block`` computes the whole
block again, but for that projection. The peer is ``torch.utils.checkpoint`` on the same block.
Activation memory is what is allocated after the forward and was not before; the peak is of the
whole step, parameters and their gradients included.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from common import CUDA, DEVICE, machine, milliseconds, write
from moe_kernels import group_rows, grouped_mm, route
from moe_parallel import recompute, replayed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Shape(NamedTuple):
    """Tokens, model and hidden dimension, experts, routes of a token, heads, sequence length."""

    T: int
    D: int
    F: int
    E: int
    K: int
    heads: int
    S: int


GPU = Shape(T=16384, D=2048, F=1024, E=64, K=8, heads=16, S=4096)
SMOKE = Shape(T=64, D=32, F=16, E=4, K=2, heads=2, S=32)


class TakeRows(torch.autograd.Function):
    """Rows in the order of experts; the gradient of a token is the sum over its K rows."""

    @staticmethod
    def forward(ctx, x_TD, token_N, row_TK):
        ctx.save_for_backward(row_TK)
        return x_TD[token_N]

    @staticmethod
    def backward(ctx, dy_ND):
        (row_TK,) = ctx.saved_tensors
        return dy_ND[row_TK].sum(1), None, None


class SumRows(torch.autograd.Function):
    """The sum of a token's K rows."""

    @staticmethod
    def forward(ctx, y_ND, token_N, row_TK):
        ctx.save_for_backward(token_N)
        return y_ND[row_TK].sum(1)

    @staticmethod
    def backward(ctx, dy_TD):
        (token_N,) = ctx.saved_tensors
        return dy_TD[token_N], None, None


class Block(nn.Module):
    """A block that recomputes as it is told."""

    def __init__(self, shape: Shape, how: str):
        super().__init__()
        self.shape, self.how = shape, how
        D, E = shape.D, shape.E
        options = {"dtype": torch.bfloat16 if CUDA else torch.float32, "device": DEVICE}
        self.qkv, self.out = (nn.Linear(D, n, bias=False, **options) for n in (3 * D, D))
        self.router = nn.Linear(D, E, bias=False, **{**options, "dtype": torch.float32})
        self.up = nn.Parameter(torch.randn(E, 2 * shape.F, D, **options) * D**-0.5)
        self.down = nn.Parameter(torch.randn(E, D, shape.F, **options) * shape.F**-0.5)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.how == "torch.utils.checkpoint":
            return checkpoint(self.whole, x_TD, use_reentrant=False)
        if self.how == "block":
            return recompute(self.all_but_down, x_TD, then=self.down_and_sum)
        return self.whole(x_TD)

    def whole(self, x_TD: Tensor) -> Tensor:
        again = recompute if self.how == "selective" else plain
        h_TD = x_TD + self.out(self.attend(again(norm, x_TD, then=self.qkv)))
        routing = self.routing(h_TD)
        weight_N, offsets_E1, token_N, row_TK = routing
        y_TD = again(
            self.hidden_rows, h_TD, weight_N, offsets_E1, token_N, row_TK,
            then=lambda rows: SumRows.apply(
                grouped_mm(rows, self.down, offsets_E1), token_N, row_TK
            ),
        )  # fmt: skip
        return h_TD + y_TD

    def all_but_down(self, x_TD: Tensor) -> tuple[Tensor, ...]:
        h_TD = x_TD + self.out(self.attend(self.qkv(norm(x_TD))))
        weight_N, offsets_E1, token_N, row_TK = self.routing(h_TD)
        rows = self.hidden_rows(h_TD, weight_N, offsets_E1, token_N, row_TK)
        return h_TD, rows, offsets_E1, token_N, row_TK

    def down_and_sum(
        self, h_TD: Tensor, rows: Tensor, offsets_E1: Tensor, token_N: Tensor, row_TK: Tensor
    ) -> Tensor:
        return h_TD + SumRows.apply(grouped_mm(rows, self.down, offsets_E1), token_N, row_TK)

    def attend(self, qkv: Tensor) -> Tensor:
        T, D, _, _, _, heads, S = self.shape
        q, k, v = qkv.view(T // S, S, 3, heads, D // heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(T, D)

    def routing(self, h_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return weights, and the experts' rows: decided once, also if the block runs again."""
        K = self.shape.K
        again = recompute if self.how == "selective" else plain
        logits_TE = again(lambda h: norm(h).float(), h_TD, then=self.router)

        def decide() -> tuple[Tensor, Tensor, Tensor, Tensor]:
            expert_TK = route(logits_TE.detach(), K).expert_TK.long()
            groups = group_rows(expert_TK, self.shape.E)
            slot_N = groups.slot_of_row_N.long()
            row_TK = groups.row_of_slot_TK.long()
            return expert_TK, groups.offsets_E1, slot_N, row_TK

        expert_TK, offsets_E1, slot_N, row_TK = replayed(decide)
        weight_N = logits_TE.softmax(-1).gather(1, expert_TK).flatten()[slot_N]
        return weight_N, offsets_E1, slot_N // K, row_TK

    def hidden_rows(
        self, h_TD: Tensor, weight_N: Tensor, offsets_E1: Tensor, token_N: Tensor, row_TK: Tensor
    ) -> Tensor:
        rows = TakeRows.apply(norm(h_TD), token_N, row_TK)
        gate, up = grouped_mm(rows, self.up, offsets_E1).chunk(2, -1)
        return F.silu(gate) * up * weight_N[:, None].to(up.dtype)


def norm(x_TD: Tensor) -> Tensor:
    return F.rms_norm(x_TD, x_TD.shape[-1:])


def plain(part: Callable, *args: Tensor, then: Callable) -> Tensor:
    """Call without recomputation."""
    return then(part(*args))


def measure(how: str, shape: Shape, repeat: int) -> dict:
    """Return memory and time of four blocks."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(shape, how) for _ in range(4)))
    dtype = torch.bfloat16 if CUDA else torch.float32
    x_TD = torch.randn(shape.T, shape.D, device=DEVICE, dtype=dtype, requires_grad=True)
    dy_TD = torch.randn_like(x_TD)

    def step() -> None:
        for p in blocks.parameters():
            p.grad = None
        blocks(x_TD).backward(dy_TD)

    step()
    grads = [p.grad.double().norm().item() for p in blocks.parameters()]
    row: dict = {"what": how, **shape._asdict(), "gradient_norm": sum(grads)}
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y_TD = blocks(x_TD)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before - y_TD.nbytes
        y_TD.backward(dy_TD)
        torch.cuda.synchronize()
        row |= {
            "activation_mb": round(kept / 1e6, 1),
            "peak_mb": round(torch.cuda.max_memory_allocated() / 1e6, 1),
        }
    row["step_ms"] = round(milliseconds(step, repeat), 3)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a small shape, twice")
    parser.add_argument("--out", type=Path, help="also write everything here, as JSON")
    args = parser.parse_args()
    shape, repeat = (GPU, 20) if CUDA and not args.smoke else (SMOKE, 2)
    where = machine()
    print(json.dumps(where))
    rows = []
    for how in ("nothing", "selective", "block", "torch.utils.checkpoint"):
        row = measure(how, shape, repeat)
        first = rows[0] if rows else row
        row["throughput"] = round(first["step_ms"] / row["step_ms"], 3)
        if CUDA:
            row["memory"] = round(row["activation_mb"] / first["activation_mb"], 3)
        same = abs(row["gradient_norm"] - first["gradient_norm"]) <= 1e-6 * first["gradient_norm"]
        if not same:
            raise SystemExit(f"{how}: other gradients than without recomputation")
        print(json.dumps(row), flush=True)
        rows.append(row)
    write(rows, where, args.out)
    print("bars: selective memory <= 0.35 at throughput >= 0.82, block <= 0.12 at >= 0.77")


if __name__ == "__main__":
    main()
