"""Which tokens a token sees: those before it, in its document, inside the window of its layer.

Whole rows without a window take torch's causal attention. Anything else takes variable-length
flash attention where that runs (CUDA, half precision), and torch's attention with a mask, which
is the oracle, everywhere else.
"""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_train.data import Batch


class Sight:
    """What the tokens of one microbatch see.

    Args:
        shape: B rows of S tokens.
        device: Where masks are made.
        document_BS: int32, number of the document of each token in its row, not decreasing from
            0; None if a row is one document.
        num_documents: Documents of all rows together, if the host knows it. Without it documents
            are masked instead, as counting them would make the host wait for the device.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        device: torch.device,
        document_BS: Tensor | None = None,
        num_documents: int | None = None,
    ):
        self.shape, self.device = shape, device
        self.document_BS, self.num_documents = document_BS, num_documents
        self._masks: dict[int, Tensor] = {}
        self._starts: Tensor | None = None

    def is_whole(self, window: int) -> bool:
        """Return whether a token sees every token before it in its row."""
        return self.document_BS is None and not 0 < window < self.shape[1]

    def mask(self, window: int) -> Tensor:
        """Return bool ``[B or 1, 1, S, S]``: whether the token of a row sees that of a column."""
        if window not in self._masks:
            at_S = torch.arange(self.shape[1], device=self.device)
            back_SS = at_S[:, None] - at_S
            seen = (back_SS >= 0) & (back_SS < window) if window else back_SS >= 0
            seen = seen[None, None]
            if self.document_BS is not None:
                of = self.document_BS
                seen = seen & (of[:, None, :, None] == of[:, None, None, :])
            self._masks[window] = seen
        return self._masks[window]

    def starts(self) -> Tensor:
        """Return int32: where each document starts in all rows laid end to end, and their end.

        The host must know how many documents there are.
        """
        if self._starts is None:
            B, S = self.shape
            if self.document_BS is None:
                starts = torch.arange(0, B * S + 1, S, device=self.device)
            else:
                assert self.num_documents is not None
                first_BS = torch.ones_like(self.document_BS, dtype=torch.bool)
                first_BS[:, 1:] = self.document_BS[:, 1:] != self.document_BS[:, :-1]
                found = torch.nonzero_static(
                    first_BS.flatten(), size=self.num_documents, fill_value=B * S
                )
                starts = F.pad(found.flatten(), (0, 1), value=B * S)
            self._starts = starts.to(torch.int32)
        return self._starts


def sight_of(batch: Batch) -> Sight:
    """Return what the tokens of a batch see."""
    B, S = batch.inputs_BS.shape
    number = None if batch.documents_B is None else int(batch.documents_B.sum())
    return Sight((B, S), batch.inputs_BS.device, batch.document_BS, number)


def attend(q_BHSC: Tensor, k_BHSC: Tensor, v_BHSC: Tensor, sight: Sight, window: int) -> Tensor:
    """Return for each token the mean of the values that it sees, weighted by softmax scores.

    FLOPs forward: ``2 (C + C_v)`` for each query head and each pair of tokens of which one sees
    the other.

    Args:
        q_BHSC: Queries.
        k_BHSC: Keys; each head serves as many query heads as there are for one.
        v_BHSC: Values, as many heads as keys; they may be narrower.
        sight: Of the microbatch.
        window: Of the layer; 0 for none.
    """
    if not q_BHSC.is_cuda or not len(q_BHSC):
        return _masked(q_BHSC, k_BHSC, v_BHSC, sight, window)
    # Flash attention has one width. Zeros beside the values cost less than to go without it.
    C_v = v_BHSC.shape[-1]
    v_BHSC = F.pad(v_BHSC, (0, q_BHSC.shape[-1] - C_v)) if C_v < q_BHSC.shape[-1] else v_BHSC
    if not sight.is_whole(window) and _flash_can(q_BHSC, v_BHSC, sight):
        return _flash(q_BHSC, k_BHSC, v_BHSC, sight, window)[..., :C_v]
    return _masked(q_BHSC, k_BHSC, v_BHSC, sight, window)[..., :C_v]


def _masked(q: Tensor, k: Tensor, v: Tensor, sight: Sight, window: int) -> Tensor:
    if sight.is_whole(window):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    mask = sight.mask(window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def _flash_can(q: Tensor, v: Tensor, sight: Sight) -> bool:
    return (
        q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] == v.shape[-1]
        and q.shape[-1] % 8 == 0
        and q.shape[-1] <= 256
        and (sight.document_BS is None or sight.num_documents is not None)
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
        and "window_size" in _varlen()[1]
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, sight: Sight, window: int) -> Tensor:
    (B, S), starts, (varlen_attn, names) = sight.shape, sight.starts(), _varlen()
    # Releases in which the argument is missing share key heads without being asked.
    shared = {"enable_gqa": True} if "enable_gqa" in names else {}
    y_THC = varlen_attn(
        *(x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)),
        starts, starts, S, S,
        window_size=(window - 1 if window else -1, 0), **shared,
    )  # fmt: skip
    return y_THC.unflatten(0, (B, S)).transpose(1, 2)


@lru_cache
def _varlen() -> tuple[Callable[..., Any], frozenset[str]]:
    """Return torch's function and the names of its arguments, which differ between releases."""
    # Imports the compiler, 4 s of the processor that only who needs it should wait for.
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

    return varlen_attn, frozenset(inspect.signature(varlen_attn).parameters)
