"""Dotted flags of the command line, read by tyro and refused in one line."""

import contextlib
import dataclasses
import io
import itertools
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from moe_train.load_config.explain import attributes_of
from moe_train.load_config.names import nearest
from moe_train.load_config.tree import Leaf, fields_of
from moe_train.load_config.values import ConfigError, alternatives_of, describe

Flags = dict[str, list[str]]
"""The words after each flag."""
_FLAG = re.compile(r"--[A-Za-z]")


class Given(NamedTuple):
    """The words of a command line, sorted by option.

    Attributes:
        preset: After the last ``--preset``, or None.
        files: After each ``--config``.
        flags: After each other flag, by dotted name.
    """

    preset: str | None
    files: list[str]
    flags: Flags


def split(argv: Sequence[str], leaves: Mapping[str, Leaf]) -> Given:
    """Sort the words of the command line by option, and refuse what tyro would not know."""
    names = {key.replace("_", "-"): key for key in leaves}
    own: dict[str, list[str]] = {"config": [], "preset": []}
    flags: Flags = {}
    for option, words in _group(argv):
        name = option[2:].replace("_", "-")
        positive = re.sub(r"(^|\.)no-([^.]+)$", r"\1\2", name)
        if name in own and name not in names:
            if len(words) != 1:
                what = "file" if name == "config" else "name"
                raise ConfigError(f"--{name} takes one {what}, got {' '.join(words) or 'nothing'}")
            own[name] += words
        elif name in names:
            flags[names[name]] = words
        elif leaves.get(names.get(positive, ""), Leaf(None, None)).type is bool and not words:
            flags[names[positive]] = ["false"]
        else:
            raise ConfigError(f"unknown option {option}{nearest(name, [*names, *own], '--')}")
    return Given(own["preset"][-1] if own["preset"] else None, own["config"], flags)


def _group(argv: Sequence[str]) -> list[tuple[str, list[str]]]:
    groups: list[tuple[str, list[str]]] = []
    for word in argv:
        if _FLAG.match(word):
            option, equals, value = word.partition("=")
            groups.append((option, [value] if equals else []))
        elif groups:
            groups[-1][1].append(word)
        else:
            raise ConfigError(f"unexpected argument {word!r}: options are written --name value")
    return groups


def read_flags(
    cls: Any, flags: Flags, leaves: Mapping[str, Leaf], values: dict[str, Any]
) -> dict[str, Any]:
    """Return the values of the flags by dotted name.

    Args:
        cls: The root dataclass of the tree.
        flags: The words after each flag.
        leaves: Of ``cls``.
        values: What the flags override.

    Raises:
        ConfigError: If a flag's words do not make a value of its type.
    """
    words = [_tyro_words(key, flags[key], leaves[key].type) for key in flags]
    parsed = parse_with_tyro(mirror(cls, values), list(itertools.chain(*words)))
    if parsed is not None:
        return {key: operator.attrgetter(key)(parsed) for key in flags}
    for key, got in flags.items():  # which one was it? Each is tried alone
        kind = leaves[key].type
        alone = dataclasses.make_dataclass("Alone", [("value", kind)])
        if parse_with_tyro(alone, _tyro_words("value", got, kind)) is None:
            found = " ".join(got) or "nothing"
            raise ConfigError(f"--{key} must be {describe(kind)}, got {found!r}")
    raise ConfigError(f"cannot read the options {' '.join('--' + key for key in flags)}")


def _tyro_words(key: str, words: list[str], kind: Any) -> list[str]:
    if bool in alternatives_of(kind)[0]:
        words = [word.capitalize() for word in words or ["true"]]
    option = "--" + key.replace("_", "-")
    # With "=", a value may itself begin with a hyphen.
    return [f"{option}={words[0]}"] if len(words) == 1 else [option, *words]


def parse_with_tyro(cls: Any, words: list[str], prog: str = "", description: str = "") -> Any:
    """Return the instance that tyro makes, or None where it refuses the words."""
    import tyro  # noqa: PLC0415 - takes 0.4 s, which a run without flags need not wait for

    # tyro draws a box of several lines for an error. Ours is one line, made by the caller.
    off, silence = tyro.conf.FlagConversionOff, io.StringIO()
    try:
        with contextlib.redirect_stderr(silence):
            return tyro.cli(cls, args=words, prog=prog, description=description, config=[off])
    except SystemExit as stop:
        if stop.code:
            return None
        raise


def mirror(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Copy a dataclass without its validation, with ``values`` as its defaults.

    tyro makes an instance as soon as it has parsed the flags. With a copy, the real class is
    made once, by `build`, and its errors look the same whichever source the value came from.
    """
    fields = []
    for field, key, kind in fields_of(cls, prefix):
        if dataclasses.is_dataclass(kind):
            part = mirror(kind, values, f"{key}.")
            fields.append((field.name, part, dataclasses.field(default_factory=part)))
        elif values[key] is dataclasses.MISSING:
            fields.append((field.name, kind, dataclasses.field()))
        else:
            fields.append((field.name, kind, dataclasses.field(default=values[key])))
    copy = dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)
    about = (cls.__doc__ or "").partition("\n")[0]
    lines = [f"    {name}: {text}" for name, text in attributes_of(cls).items()]
    copy.__doc__ = "\n".join([about, "", "Attributes:", *lines])
    copy.__module__ = cls.__module__
    return copy
