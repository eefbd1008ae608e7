"""Sequences of one step, and what should be predicted at each of their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

IGNORED = -100
"""Target of a token that has none, as in ``torch.nn.functional.cross_entropy``."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences and what should be predicted at each token.

    Attributes:
        inputs_BS: int64, B sequences of S tokens.
        targets_BS: int64, the next token, or ``IGNORED``. A token without a target is padding:
            it is not routed, and counts in no loss and no statistic.
        padded: Whether there is padding. Known to the host, so that the usual case is not slowed.
        document_BS: int32, the number of each token's document within its sequence: 0, then the
            same or one more. Attention stays inside a document. None: one document a sequence.
        valid_B: Real tokens of each sequence, on the host; None where only the device knows.
        documents_B: Documents of each sequence, on the host. Without it attention cannot take
            the variable-length kernel, and masks documents instead.
    """

    inputs_BS: Tensor
    targets_BS: Tensor
    padded: bool = False
    document_BS: Tensor | None = None
    valid_B: NDArray[np.int64] | None = None
    documents_B: NDArray[np.int64] | None = None

    @property
    def mask_T(self) -> Tensor | None:  # noqa: N802, a shape suffix
        """Bool, true for real tokens; None if all are."""
        return (self.targets_BS != IGNORED).flatten() if self.padded else None

    @property
    def num_tokens(self) -> int:
        """Real tokens. Waits for the device only if there is padding and no ``valid_B``."""
        if not self.padded:
            return self.targets_BS.numel()
        if self.valid_B is not None:
            return int(self.valid_B.sum())
        return int((self.targets_BS != IGNORED).sum())

    def split(self, size: int) -> list["Batch"]:
        """Cut into microbatches of ``size`` sequences; 0 for one microbatch of all."""
        rows = len(self.inputs_BS)
        size = size or max(1, rows)
        return [self.rows(start, start + size) for start in range(0, max(1, rows), size)]

    def rows(self, start: int, stop: int) -> "Batch":
        """Return some of the sequences, as views."""
        document_BS, valid_B, documents_B = self.document_BS, self.valid_B, self.documents_B
        return Batch(
            self.inputs_BS[start:stop],
            self.targets_BS[start:stop],
            self.padded,
            None if document_BS is None else document_BS[start:stop],
            None if valid_B is None else valid_B[start:stop],
            None if documents_B is None else documents_B[start:stop],
        )

    @staticmethod
    def joined(batches: Sequence["Batch"]) -> "Batch":
        """Return the sequences of several batches that are alike in what they carry."""
        documents = [b.document_BS for b in batches if b.document_BS is not None]
        return Batch(
            torch.cat([b.inputs_BS for b in batches]),
            torch.cat([b.targets_BS for b in batches]),
            any(b.padded for b in batches),
            torch.cat(documents) if documents else None,
            _concatenate([b.valid_B for b in batches]),
            _concatenate([b.documents_B for b in batches]),
        )

    def taken(self, order_B: NDArray[np.int64]) -> "Batch":
        """Return the sequences in another order, on the host."""
        batch = self.each(lambda tensor: tensor[torch.from_numpy(order_B)])
        return replace(
            batch,
            valid_B=None if self.valid_B is None else self.valid_B[order_B],
            documents_B=None if self.documents_B is None else self.documents_B[order_B],
        )

    def to(self, device: torch.device) -> "Batch":
        """Copy to a device. The copy does not wait where the tensors are pinned."""
        return self.each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "Batch":
        """Copy into pinned memory, from which a GPU copies without the host waiting."""
        return self.each(Tensor.pin_memory)

    def each(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to every tensor."""
        document_BS = None if self.document_BS is None else function(self.document_BS)
        return Batch(
            function(self.inputs_BS), function(self.targets_BS), self.padded, document_BS,
            self.valid_B, self.documents_B,
        )  # fmt: skip


def _concatenate(counts: Sequence[NDArray[np.int64] | None]) -> NDArray[np.int64] | None:
    known = [count for count in counts if count is not None]
    return np.concatenate(known) if known else None
