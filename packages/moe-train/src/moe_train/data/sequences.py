"""Sequences cut from text at multiples of their length, wherever documents begin and end."""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from moe_train.corpus import CorpusError
from moe_train.data.batch import Batch
from moe_train.data.order import visiting_order
from moe_train.data.tokens import Tokens


class SequenceSource(Protocol):
    """What a trainer needs of its data. All of it is a function of the arguments alone."""

    @property
    def count(self) -> int:
        """Sequences there are. Their numbers are ``0..count-1``."""
        ...

    def order(self, first: int, number: int, seed: int) -> NDArray[np.int64]:
        """Return which sequences are at positions ``first`` to ``first + number - 1``."""
        ...

    def batch(self, numbers: NDArray[np.int64], device: torch.device | None = None) -> Batch:
        """Return the sequences of these numbers."""
        ...

    def num_tokens(self, numbers: NDArray[np.int64]) -> int:
        """Return how many real tokens the sequences of these numbers have, without reading them."""
        ...

    def spread(self, number: int) -> NDArray[np.int64]:
        """Return up to ``number`` sequence numbers, evenly spread over all."""
        ...


class Sequences:
    """Sequences of tokens, cut from text at multiples of ``length``.

    Args:
        tokens: The text, or its bytes as uint8.
        length: S, predicted tokens of one sequence.

    Raises:
        CorpusError: If the text is too short for one sequence.
    """

    def __init__(self, tokens: Tokens | NDArray[Any], length: int):
        if not isinstance(tokens, Tokens):
            ends = np.asarray([len(tokens)], dtype=np.int64)
            tokens = Tokens((tokens,), (ends,), 256, len(tokens), "the text")
        self.tokens, self.length = tokens, length
        self.count = (len(tokens) - 1) // length
        if self.count < 1:
            raise CorpusError(
                f"{tokens.origin} has {len(tokens)} tokens; one sequence of data.sequence_length "
                f"{length} needs {length + 1}"
            )

    def order(self, first: int, number: int, seed: int) -> NDArray[np.int64]:
        """Return which sequences are at positions ``first`` to ``first + number - 1``."""
        return visiting_order(first, number, self.count, seed)

    def batch(self, numbers: NDArray[np.int64], device: torch.device | None = None) -> Batch:
        """Return the sequences of these numbers, each in ``0..count-1``."""
        rows = self.tokens.rows(numbers * self.length, self.length + 1)
        # In numpy, as torch would start threads for it in the thread that makes batches ahead.
        inputs, targets = rows[:, :-1].copy(), rows[:, 1:].copy()
        return Batch(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device))

    def num_tokens(self, numbers: NDArray[np.int64]) -> int:
        """Return how many tokens the sequences of these numbers have."""
        return len(numbers) * self.length

    def spread(self, number: int) -> NDArray[np.int64]:
        """Return up to ``number`` sequence numbers, evenly spread over the text."""
        return evenly(number, self.count)


def evenly(number: int, count: int) -> NDArray[np.int64]:
    """Return up to ``number`` numbers, evenly spread over ``0..count-1``."""
    number = max(0, min(number, count))
    return np.arange(number, dtype=np.int64) * count // max(1, number)
