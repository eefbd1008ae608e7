"""Where the text comes from and how it is cut."""

import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal, NamedTuple

from moe_train.config.rules import (
    is_text,
    require,
    require_no_less_than_zero,
    require_positive,
)

_SOURCE = re.compile(r"(?P<name>[\w-]+)=(?P<weight>[^:]+):(?P<path>.+)")


class Source(NamedTuple):
    """One part of a mixture.

    Attributes:
        name: What it is called in records.
        weight: Positive; only the ratios of weights count.
        path: A folder of text or of token shards.
    """

    name: str
    weight: Fraction
    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where the text comes from and how it is cut.

    Attributes:
        path: A folder of text files or of token shards; without it, the sources of Python's
            standard library.
        suffix: Which files of a folder of text are read, by the end of their name.
        sources: Several folders instead of ``path``, each as ``name=weight:folder``, such as
            ``code=0.7:shards/code``. Sequences are taken from them in the ratios of the weights.
        tokenizer: A tokenizer.json for folders of text, which are then tokenised once, into the
            run's folder; without it, bytes are tokens. Shards bring their own.
        eos: Token of ``tokenizer`` that ends each document; without it, nothing does.
        sequence_length: Tokens that are predicted in one sequence.
        packing: ``stream`` cuts the text at multiples of the length. ``documents`` fills rows
            with whole documents that do not see each other, and pads what is left.
        prefetch: Batches that are made ahead by a thread; 0 to make each when it is needed.
        seed: Decides the order of the sequences.
        allow_changed: Go on from a checkpoint though the text is not the one it was trained on.
    """

    path: Path | None = None
    suffix: str = ".py"
    sources: tuple[str, ...] = ()
    tokenizer: Path | None = None
    eos: str = ""
    sequence_length: int = 128
    packing: Literal["stream", "documents"] = "stream"
    prefetch: int = 2
    seed: int = 0
    allow_changed: bool = False

    def __post_init__(self) -> None:
        require_positive(sequence_length=self.sequence_length)
        require_no_less_than_zero(prefetch=self.prefetch)
        require(
            not (self.sources and self.path is not None),
            f"path {self.path} and sources are two ways to say the same; set one of them",
        )
        require(
            not self.eos or self.tokenizer is not None,
            f"eos {self.eos!r} is a token of data.tokenizer, which is not set",
        )
        names = [source.name for source in self.mixture()]
        for name in names:
            require(names.count(name) == 1, f"sources: two are called {name!r}")

    def mixture(self) -> list[Source]:
        """Return ``sources``, taken apart.

        Raises:
            ValueError: If one is not ``name=weight:folder`` with a positive weight.
        """
        return [_parse(text) for text in self.sources]


def _parse(text: str) -> Source:
    found = _SOURCE.fullmatch(text)
    if found is None:
        raise ValueError(f"sources: {text!r} is not name=weight:folder, as in code=0.7:shards/code")
    require(is_text(text), f"sources: {text!r} is not UTF-8, as files that name it must be")
    try:
        weight = Fraction(found["weight"].strip())
    except (ValueError, ZeroDivisionError) as error:
        raise ValueError(f"sources: {found['weight']!r} of {text!r} is not a number") from error
    require(weight > 0, f"sources: the weight of {found['name']} must be positive, got {weight}")
    return Source(found["name"], weight, Path(found["path"]))
