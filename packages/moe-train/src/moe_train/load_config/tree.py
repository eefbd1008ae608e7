"""Trees of frozen dataclasses as flat leaves by dotted name, as plain values and as TOML."""

import dataclasses
import functools
import operator
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_type_hints

import tomli_w

from moe_train.load_config.names import nearest
from moe_train.load_config.values import ConfigError, alternatives_of, convert, one_line

Config = TypeVar("Config")


class Leaf(NamedTuple):
    """A setting of a tree.

    Attributes:
        type: Its type.
        default: ``dataclasses.MISSING`` where the user must give a value.
    """

    type: Any
    default: Any


def from_dict(cls: type[Config], tree: Mapping[str, Any], *, source: str = "config") -> Config:
    """Make a configuration from nested plain values, such as `to_dict` returns.

    Args:
        cls: The root dataclass of the tree.
        tree: Values by field name; what is absent keeps its default.
        source: What messages call the place that the values come from.

    Raises:
        ConfigError: If a key is unknown, a value has the wrong type or a dataclass refuses it.
    """
    leaves = leaves_of(cls)
    values = {key: leaf.default for key, leaf in leaves.items()} | flatten(tree, leaves, source)
    missing = [key for key, value in values.items() if value is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"{source}: {missing[0]} is missing and has no default")
    return build(cls, values)


def to_dict(config: Any) -> dict[str, Any]:
    """Return the tree as plain values: dict, list, str, int, float, bool and None."""
    return {f.name: _plain(getattr(config, f.name)) for f in dataclasses.fields(config) if f.init}


def to_toml(config: Any) -> str:
    """Return TOML that `load_config` reads back as an equal configuration.

    TOML has no null. A None is left out where it is the default, and written ``"None"``, as on
    the command line, where it is not.

    Raises:
        ValueError: If the tree holds the string ``"None"`` where a None is allowed too.
    """
    tree = to_dict(config)
    for key, leaf in leaves_of(type(config)).items():
        *sections, name = key.split(".")
        section = functools.reduce(operator.getitem, sections, tree)
        if section[name] == "None" and alternatives_of(leaf.type)[1]:
            raise ValueError(f"{key}: the string 'None' cannot be told from no value")
        if section[name] is None:
            if leaf.default is None:
                del section[name]
            else:
                section[name] = "None"
    return tomli_w.dumps(tree)


def diff_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line ``optimizer.lr: 0.003 -> 0.001`` for each leaf that differs.

    Args:
        old: A tree from `to_dict`, perhaps written by an earlier version with other keys.
        new: A tree from `to_dict`.
    """
    olds, news = dict(walk(old)), dict(walk(new))
    lines = []
    for key in [*news, *(key for key in olds if key not in news)]:
        before, after = (repr(t[key]) if key in t else "absent" for t in (olds, news))
        if before != after:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def fields_of(cls: Any, prefix: str) -> list[tuple[dataclasses.Field[Any], str, Any]]:
    """Return each field with its dotted name and its type, of which hints may be strings."""
    hints = get_type_hints(cls)
    return [(f, prefix + f.name, hints[f.name]) for f in dataclasses.fields(cls) if f.init]


def leaves_of(cls: Any, default: Any = dataclasses.MISSING, prefix: str = "") -> dict[str, Leaf]:
    """Flatten a dataclass to its leaves by dotted name; ``default`` is an instance, if known."""
    leaves = {}
    for field, key, kind in fields_of(cls, prefix):
        if default is not dataclasses.MISSING:
            value = getattr(default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = field.default
        if dataclasses.is_dataclass(kind):
            leaves |= leaves_of(kind, value, f"{key}.")
        else:
            leaves[key] = Leaf(kind, value)
    return leaves


def build(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Make the tree from a value for each leaf.

    Raises:
        ConfigError: If a dataclass refuses its values.
    """
    arguments = {}
    for field, key, kind in fields_of(cls, prefix):
        nested = dataclasses.is_dataclass(kind)
        arguments[field.name] = build(kind, values, f"{key}.") if nested else values[key]
    try:
        return cls(**arguments)
    except ValueError as error:
        section = f"{prefix[:-1]}: " if prefix else ""
        raise ConfigError(section + one_line(error)) from error


def flatten(
    tree: Mapping[str, Any], leaves: Mapping[str, Leaf], source: str, prefix: str = ""
) -> dict[str, Any]:
    """Return nested plain values by dotted name, each converted to its leaf's type.

    Raises:
        ConfigError: If a key is unknown or a value has the wrong type.
    """
    sections = {key[: m.start()] for key in leaves for m in re.finditer(r"\.", key)}
    values = {}
    for name, value in tree.items():
        key = prefix + name
        if key in leaves:
            values[key] = convert(value, leaves[key].type, source, key)
        elif key in sections and isinstance(value, Mapping):
            values |= flatten(value, leaves, source, f"{key}.")
        elif key in sections:
            raise ConfigError(f"{source}: {key} is a section [{key}], got {value!r}")
        else:
            raise ConfigError(f"{source}: unknown key {key}{nearest(key, [*leaves, *sections])}")
    return values


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def walk(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    """Yield the leaves of a tree of plain values with their dotted names."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from walk(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
