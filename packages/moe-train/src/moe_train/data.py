"""Which sequences a step sees. The whole state is one number: how many were seen before.

The training text is cut into N sequences. They are visited in an order that is a permutation of
all N, then another permutation, and so on. Position ``p`` of that endless order is the same
whatever the number of ranks, so a run can be continued on any number of them::

    position   0 1 2 3 | 4 5 6 7 | ...      batch_size 4
    rank 0     0 1     | 4 5     |          2 ranks
    rank 1         2 3 |     6 7 |
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_train.corpus import CorpusError

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
    """

    inputs_BS: Tensor
    targets_BS: Tensor
    padded: bool = False

    @property
    def mask_T(self) -> Tensor | None:  # noqa: N802, a shape suffix
        """Bool, true for real tokens; None if all are."""
        return (self.targets_BS != IGNORED).flatten() if self.padded else None

    @property
    def num_tokens(self) -> int:
        """Real tokens. Waits for the device if there is padding."""
        return int((self.targets_BS != IGNORED).sum()) if self.padded else self.targets_BS.numel()

    def split(self, size: int) -> list["Batch"]:
        """Cut into microbatches of ``size`` sequences; 0 for one microbatch of all."""
        size = size or max(1, len(self.inputs_BS))
        pairs = zip(self.inputs_BS.split(size), self.targets_BS.split(size), strict=True)
        return [Batch(inputs, targets, self.padded) for inputs, targets in pairs]


class Sequences:
    """Sequences of bytes, cut from text at multiples of ``length``.

    Args:
        text: uint8.
        length: S, predicted bytes of one sequence.

    Raises:
        CorpusError: If the text is too short for one sequence.
    """

    def __init__(self, text: NDArray[np.uint8], length: int):
        self.text, self.length = text, length
        self.count = (len(text) - 1) // length
        if self.count < 1:
            raise CorpusError(
                f"the text has {len(text)} bytes; one sequence of data.sequence_length {length} "
                f"needs {length + 1}"
            )

    def batch(self, numbers: NDArray[np.int64], device: torch.device | None = None) -> Batch:
        """Return the sequences of these numbers, each in ``0..count-1``."""
        starts = numbers[:, None] * self.length
        tokens = self.text[starts + np.arange(self.length + 1)].astype(np.int64)
        tokens_BS = torch.from_numpy(tokens).to(device)
        return Batch(tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].contiguous())

    def spread(self, number: int) -> NDArray[np.int64]:
        """Return up to ``number`` sequence numbers, evenly spread over the text."""
        number = min(number, self.count)
        return np.arange(number, dtype=np.int64) * self.count // number


def visiting_order(first: int, number: int, count: int, seed: int) -> NDArray[np.int64]:
    """Return which sequences are at positions ``first`` to ``first + number - 1``.

    Args:
        first: Position of the first, at least 0.
        number: How many.
        count: N, sequences in the text. Every run of N positions from a multiple of N on visits
            each sequence once.
        seed: Decides the permutations.
    """
    epochs = range(first // count, (first + number - 1) // count + 1)
    order = np.concatenate([_permutation(epoch, count, seed) for epoch in epochs])
    start = first - first // count * count
    return order[start : start + number]


@lru_cache(maxsize=2)
def _permutation(epoch: int, count: int, seed: int) -> NDArray[np.int64]:
    """Sort the numbers by a hash of each, splitmix64, which stays the same for ever.

    Random generators of libraries do not promise that, and a run is continued for weeks.
    """
    key = np.arange(count, dtype=np.uint64) + np.uint64(epoch << 40)
    for salt in (np.uint64(seed % 2**64), np.uint64(0)):
        key = (key ^ salt) + np.uint64(0x9E3779B97F4A7C15)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key = key ^ (key >> np.uint64(31))
    return np.argsort(key, kind="stable")


def rank_share(numbers: NDArray[np.int64], rank: int, size: int) -> NDArray[np.int64]:
    """Return the part of rank ``rank`` of ``size``: consecutive, differing by at most one."""
    each, rest = divmod(len(numbers), size)
    start = rank * each + min(rank, rest)
    return numbers[start : start + each + (rank < rest)]
