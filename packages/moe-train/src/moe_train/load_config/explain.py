"""What the docstrings of a tree of dataclasses say of each setting."""

import dataclasses
import inspect
import re
from typing import Any, NamedTuple

from moe_train.load_config.tree import fields_of, leaves_of
from moe_train.load_config.values import describe

_ATTRIBUTE = re.compile(r"^    (\w+): (.*)$")


class Setting(NamedTuple):
    """One setting.

    Attributes:
        key: Its dotted name.
        values: Which values it has, in words.
        default: Its default, ``dataclasses.MISSING`` where the user must give one.
        about: What it is, one line; empty if nobody has said.
    """

    key: str
    values: str
    default: Any
    about: str


def explain(cls: type) -> dict[str, Setting]:
    """Return every setting of a tree, by dotted name.

    Examples:
        >>> @dataclasses.dataclass
        ... class Run:
        ...     '''A run.
        ...
        ...     Attributes:
        ...         steps: Optimizer steps
        ...             of one run.
        ...     '''
        ...     steps: int = 100
        >>> explain(Run)["steps"]
        Setting(key='steps', values='an int', default=100, about='Optimizer steps of one run.')
    """
    docs = _documented(cls, "")
    return {
        key: Setting(key, describe(leaf.type), leaf.default, docs.get(key, ""))
        for key, leaf in leaves_of(cls).items()
    }


def about_sections(cls: type) -> dict[str, str]:
    """Return the first line of the docstring of each section, by dotted name."""
    return {
        key: (inspect.getdoc(kind) or "").partition("\n")[0]
        for _, key, kind in fields_of(cls, "")
        if dataclasses.is_dataclass(kind)
    }


def _documented(cls: Any, prefix: str) -> dict[str, str]:
    found = {prefix + name: text for name, text in attributes_of(cls).items()}
    for _, key, kind in fields_of(cls, prefix):
        if dataclasses.is_dataclass(kind):
            found |= _documented(kind, f"{key}.")
    return found


def attributes_of(cls: type) -> dict[str, str]:
    """Return what the ``Attributes:`` of a class and of those it extends say."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__):
        _, _, section = inspect.cleandoc(one.__doc__ or "").partition("Attributes:\n")
        name = ""
        for line in section.splitlines():
            if line and not line.startswith("    "):
                break
            if match := _ATTRIBUTE.match(line):
                name, found[match[1]] = match[1], match[2].strip()
            elif name and line.strip():
                found[name] += " " + line.strip()
    return found
