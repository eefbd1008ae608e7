"""What a leaf of a configuration may hold, and how it is said."""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

_NAMES = {bool: "true or false", str: "text", Path: "a path", int: "an int", float: "a float"}


class ConfigError(ValueError):
    """A configuration cannot be used. The message is one line for the person who wrote it."""


def convert(value: Any, kind: Any, source: str, key: str) -> Any:
    """Return a plain value as one of type ``kind``.

    Raises:
        ConfigError: If it is not one. The message calls it ``key`` in ``source``.
    """
    alternatives, optional = alternatives_of(kind)
    if optional and (value is None or value == "None"):
        return None
    for one in alternatives:
        try:
            return _convert_one(value, one)
        except TypeError:
            continue
    raise ConfigError(f"{source}: {key} must be {describe(kind)}, got {value!r}")


def _convert_one(value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if any(value == choice and type(value) is type(choice) for choice in get_args(kind)):
            return value
    elif get_origin(kind) is tuple:
        kinds = get_args(kind)
        if isinstance(value, list | tuple):
            if kinds[-1] is Ellipsis:
                kinds = kinds[:1] * len(value)
            if len(kinds) == len(value):
                return tuple(_convert_one(v, k) for v, k in zip(value, kinds, strict=True))
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif kind is Path and isinstance(value, str | Path):
        return Path(value)
    elif type(value) is kind:  # exactly: True is an int for isinstance
        return value
    raise TypeError


def alternatives_of(kind: Any) -> tuple[list[Any], bool]:
    """Split ``A | B | None`` into its types and whether None is one of them."""
    if get_origin(kind) in (Union, types.UnionType):
        members = get_args(kind)
        return [m for m in members if m is not types.NoneType], types.NoneType in members
    return [kind], False


def describe(kind: Any) -> str:
    """Say what values a type has, in words."""
    alternatives, optional = alternatives_of(kind)
    words = []
    for one in alternatives:
        members = [a for a in get_args(one) if a is not Ellipsis]
        if get_origin(one) is Literal:
            words.append(f"one of {', '.join(map(repr, members))}")
        elif get_origin(one) is tuple:
            count = "" if Ellipsis in get_args(one) else f"{len(members)} "
            words.append(f"{count}values ({', '.join(map(describe, members))})")
        else:
            words.append(_NAMES.get(one, str(one)))
    return " or ".join([*words, "None"] if optional else words)


def one_line(error: BaseException) -> str:
    """Return a message without its line breaks."""
    return " ".join(str(error).split())
