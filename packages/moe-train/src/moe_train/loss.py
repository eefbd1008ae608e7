"""Cross-entropy of a large vocabulary, a few tokens at a time.

The logits of T tokens over V words in float32 would be the largest tensor of a training step:
8192 tokens and 100,352 words are 3.1 GiB, and their gradient as much again. Here at most
``CHUNK_ELEMENTS`` of them exist at once. Their gradient is known as soon as they are, so forward
computes both and backward multiplies by a scalar: nothing is computed twice.

Cost: ``2 T D V`` FLOPs for the loss, ``4 T D V`` more where gradients are asked for.
"""

from typing import Any

import torch
import torch.nn.functional as F
from moe_parallel import WeightGradient, sink_of
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from moe_train.data import IGNORED

CHUNK_ELEMENTS = 1 << 27
"""Logits that are held at once, 512 MiB in float32."""


def cross_entropy_sum(
    h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, *, chunk_elements: int = CHUNK_ELEMENTS
) -> Tensor:
    """Return the cross-entropy of ``h @ w.T``, in nats, summed over the tokens that have a target.

    Logits come out of the product in the format of ``h_TD`` and are then float32 (float64 for
    float64). The gradient of ``w_VD`` is summed over all tokens in float32 and rounded once; if
    the parameter has a ``dw_sink``, it goes there unrounded.

    Args:
        h_TD: What the head reads.
        w_VD: The head, one row for each word.
        targets_T: int64, the word to predict, or ``IGNORED``.
        chunk_elements: Logits that are held at once; never less than those of one token.

    Returns:
        A scalar in float32 or float64.

    Examples:
        >>> h_TD, w_VD = torch.zeros(3, 2), torch.zeros(4, 2)
        >>> cross_entropy_sum(h_TD, w_VD, torch.tensor([0, IGNORED, 3])) / 2  # ln 4
        tensor(1.3863)
    """
    chunk = max(1, chunk_elements // w_VD.shape[0])
    if chunk > 128:
        chunk -= chunk % 128  # whole tiles of the product
    sink = sink_of(w_VD)
    if not torch.is_grad_enabled():  # the function is told what requires a gradient even so
        h_TD, w_VD = h_TD.detach(), w_VD.detach()
    return _CrossEntropySum.apply(h_TD, w_VD, targets_T, chunk, sink)


class _CrossEntropySum(Function):
    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, w_VD: Tensor, targets_T: Tensor, chunk: int, sink: Any
    ) -> Tensor:
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        want_h, want_w = ctx.needs_input_grad[:2]
        total = torch.zeros((), dtype=wide, device=h_TD.device)
        dh_TD = torch.empty_like(h_TD) if want_h else None
        dw_VD = torch.zeros_like(w_VD, dtype=wide) if want_w else None
        for h_CD, targets_C, out_CD in zip(
            h_TD.split(chunk),
            targets_T.split(chunk),
            h_TD.split(chunk) if dh_TD is None else dh_TD.split(chunk),
            strict=True,
        ):
            logp_CV = F.log_softmax(F.linear(h_CD, w_VD), -1, dtype=wide)
            total += F.nll_loss(logp_CV, targets_C, ignore_index=IGNORED, reduction="sum")
            if want_h or want_w:
                d_CV = _gradient(logp_CV, targets_C).to(h_TD.dtype)
                if want_h:
                    torch.mm(d_CV, w_VD, out=out_CD)
                if dw_VD is not None:
                    _add_product(dw_VD, d_CV, h_CD)
        ctx.save_for_backward(dh_TD, dw_VD)
        ctx.dtype, ctx.sink = w_VD.dtype, sink
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyrefly: ignore[bad-override]
        (scale,) = grads
        dh_TD, dw_VD = ctx.saved_tensors
        if dh_TD is not None:  # in float32, where 1 / tokens is not rounded to 8 bits
            dh_TD = (dh_TD * scale.expand(1)).to(dh_TD.dtype)
        if dw_VD is not None and ctx.sink is not None:
            ctx.sink(_weight_gradient(dw_VD, scale))
            dw_VD = None
        elif dw_VD is not None:
            dw_VD = (dw_VD * scale).to(ctx.dtype)
        return dh_TD, dw_VD, None, None, None


def _gradient(logp_CV: Tensor, targets_C: Tensor) -> Tensor:
    """Turn log-probabilities, in place, into the gradient of the summed loss for the logits."""
    d_CV = logp_CV.exp_()
    d_CV.scatter_add_(1, targets_C.clamp(min=0)[:, None], d_CV.new_full((len(d_CV), 1), -1.0))
    return d_CV.masked_fill_((targets_C == IGNORED)[:, None], 0)


def _add_product(sum_VD: Tensor, d_CV: Tensor, h_CD: Tensor) -> None:
    """Add ``d.T @ h`` without rounding it to the format of its factors."""
    if d_CV.dtype == sum_VD.dtype:
        torch.addmm(sum_VD, d_CV.T, h_CD, out=sum_VD)
    elif d_CV.is_cuda:
        torch.addmm(sum_VD, d_CV.T, h_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        torch.addmm(sum_VD, d_CV.to(sum_VD.dtype).T, h_CD.to(sum_VD.dtype), out=sum_VD)


def _weight_gradient(dw_VD: Tensor, scale: Tensor) -> WeightGradient:
    def run(out_VD: Tensor, accumulate: bool) -> None:
        with torch.no_grad():
            if accumulate:
                out_VD.addcmul_(dw_VD, scale.to(dw_VD.dtype))
            else:
                torch.mul(dw_VD, scale, out=out_VD)

    return run
