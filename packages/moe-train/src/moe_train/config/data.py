"""Where the text comes from and how it is cut."""

from dataclasses import dataclass
from pathlib import Path

from moe_train.config.rules import require_positive


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
        require_positive(sequence_length=self.sequence_length)
