"""The words of a command: some by their place, the others as flags of a dataclass."""

import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from typing import Any, TypeVar

from moe_train.load_config import ConfigError, Layer, Loaded, load_with_sources

Options = TypeVar("Options")


def read_options(
    cls: type[Options],
    argv: list[str],
    *,
    prog: str,
    about: str,
    examples: Sequence[str],
    places: Sequence[str] = (),
    base: Sequence[Layer] = (),
) -> Loaded[Options]:
    """Make the options of a command.

    Args:
        cls: The dataclass whose fields are its flags.
        argv: The words after the command's name.
        prog: The command's name.
        about: What it does, for ``--help``.
        examples: Command lines that work, for ``--help``.
        places: Fields that words before the first flag set, in this order.
        base: What comes above the defaults and below ``argv``.

    Raises:
        ConfigError: If the words cannot be understood.
    """
    needed = [f.name for f in dataclasses.fields(cls) if _is_required(f)]  # pyrefly: ignore
    usage = " ".join([prog, *(p.upper() if p in needed else f"[{p.upper()}]" for p in places)])
    description = "\n".join([about, "", "examples:", *(f"  {line}" for line in examples)])
    if any(word in ("-h", "--help") for word in argv):
        return load_with_sources(cls, ["--help"], prog=usage, description=description, base=base)
    words = list(itertools.takewhile(lambda word: not word.startswith("--"), argv))
    if len(words) > len(places):
        raise ConfigError(f"unexpected {words[len(places)]!r}; usage: {usage} [OPTIONS]")
    flags = [f"--{name.replace('_', '-')}={w}" for name, w in zip(places, words, strict=False)]
    flags += argv[len(words) :]
    for name in (name for name in places if name in needed):
        if not any(flag.startswith(f"--{name.replace('_', '-')}") for flag in flags):
            raise ConfigError(f"{name.upper()} is missing; usage: {usage} [OPTIONS]")
    return load_with_sources(cls, flags, prog=usage, description=description, base=base)


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def say(text: str) -> None:
    """Print a result."""
    sys.stdout.write(text + "\n")


def say_json(value: Any) -> None:
    """Print a result for programs."""
    say(json.dumps(value, indent=1))
