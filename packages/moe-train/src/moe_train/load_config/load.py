"""From the sources of a configuration to one tree, and where each of its values came from."""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from moe_train.load_config.flags import Given, mirror, parse_with_tyro, read_flags, split
from moe_train.load_config.names import nearest
from moe_train.load_config.tree import Leaf, build, flatten, leaves_of
from moe_train.load_config.values import ConfigError, one_line

Config = TypeVar("Config")
PRESETS = Path(__file__).parent.parent / "presets"
DEFAULT = "default"
"""The source of a value that nothing has set."""


class Layer(NamedTuple):
    """Values that stand above the defaults and below presets, files and flags.

    Attributes:
        source: What messages call the place that they come from.
        tree: Plain values, nested.
    """

    source: str
    tree: Mapping[str, Any]


class Loaded(NamedTuple, Generic[Config]):
    """A configuration and where it comes from.

    Attributes:
        config: The configuration.
        sources: For each leaf, by dotted name, the last that has set it: ``default``, ``preset
            NAME``, the name of a file, or a flag.
    """

    config: Config
    sources: dict[str, str]


def load_config(cls: type[Config], argv: list[str], *, prog: str, description: str) -> Config:
    """Make a configuration from its defaults, ``--preset``, ``--config`` files and dotted flags.

    Each overrides those before it. A bool takes ``true`` or ``false``, no value (true), or ``no-``
    before its name (false). Of a flag given twice the last counts; ``--config`` may be given
    several times. ``--help`` prints all flags and exits.

    Args:
        cls: The root dataclass of the tree.
        argv: The arguments after the command's name.
        prog: The command's name, for ``--help``.
        description: What the command does, for ``--help``.

    Raises:
        ConfigError: If a file or a flag is unknown, of the wrong type or refused by a dataclass.

    Examples:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Run:
        ...     steps: int = 100
        ...     lr: float = 1e-3
        >>> load_config(Run, ["--lr", "0.01"], prog="run", description="Run.")
        Run(steps=100, lr=0.01)
        >>> load_config(Run, ["--step", "3"], prog="run", description="Run.")
        Traceback (most recent call last):
        moe_train.load_config.values.ConfigError: unknown option --step; nearest: --steps
    """
    return load_with_sources(cls, argv, prog=prog, description=description).config


def load_with_sources(
    cls: type[Config],
    argv: list[str],
    *,
    prog: str,
    description: str,
    base: Sequence[Layer] = (),
) -> Loaded[Config]:
    """Make a configuration as ``load_config`` does, and say where each value came from.

    Args:
        cls: The root dataclass of the tree.
        argv: The arguments after the command's name.
        prog: The command's name, for ``--help``.
        description: What the command does, for ``--help``.
        base: What comes above the defaults and below everything that ``argv`` names.
    """
    leaves = leaves_of(cls)
    values = {key: leaf.default for key, leaf in leaves.items()}
    sources = dict.fromkeys(leaves, DEFAULT)

    def take(found: Mapping[str, Any], source: str) -> None:
        values.update(found)
        sources.update(dict.fromkeys(found, source))

    for layer in base:
        take(flatten(layer.tree, leaves, layer.source), layer.source)
    if any(word in ("-h", "--help") for word in argv):
        _help(cls, values, prog, description)
    given = split(argv, leaves)
    if given.preset is not None:
        name = f"preset {given.preset}"
        take(flatten(read_preset_tree(given.preset), leaves, name), name)
    for file in given.files:
        take(flatten(read_tree(file), leaves, file), file)
    missing = [k for k, v in values.items() if v is dataclasses.MISSING and k not in given.flags]
    if missing:
        raise ConfigError(f"{missing[0]} has no default: set it in the file or with --{missing[0]}")
    for key, value in _read(cls, given, leaves, values).items():
        take({key: value}, f"--{key.replace('_', '-')}")
    return Loaded(build(cls, values), sources)


def preset_names() -> list[str]:
    """Return the names that ``--preset`` takes."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def read_preset_tree(name: str) -> dict[str, Any]:
    """Return what a preset sets, as nested plain values.

    Raises:
        ConfigError: If there is no such preset.
    """
    if name not in (names := preset_names()):
        there = nearest(name, names) if names else "; there are none"
        raise ConfigError(f"unknown preset {name!r}{there}")
    return read_tree(str(PRESETS / f"{name}.toml"))


def read_tree(file: str) -> dict[str, Any]:
    """Return what a TOML file holds.

    Raises:
        ConfigError: If it cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{file} is not TOML: {one_line(error)}") from error


def _read(
    cls: Any, given: Given, leaves: Mapping[str, Leaf], values: dict[str, Any]
) -> dict[str, Any]:
    return read_flags(cls, given.flags, leaves, values) if given.flags else {}


def _help(cls: Any, values: Mapping[str, Any], prog: str, description: str) -> None:
    """Print all flags and exit."""
    also = (
        "\n\nOptions may also stand in TOML files, --config FILE, and begin from a preset, "
        "--preset NAME (`moe-train config presets` lists them). Flags override files, files "
        "override the preset."
        if any("." in key for key in leaves_of(cls))
        else ""
    )
    parse_with_tyro(mirror(cls, values), ["--help"], prog, description + also)
