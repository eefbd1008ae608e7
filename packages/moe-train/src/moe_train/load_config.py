"""Read a configuration: the defaults of its dataclasses, then TOML files, then dotted flags.

A configuration is a tree of frozen, keyword-only dataclasses. Its leaves are int, float, bool,
str, Path, Literal, a tuple of those, or any of them ``| None``. One name serves everywhere: the
field ``lr`` of the field ``optimizer`` is ``optimizer.lr`` in messages, ``[optimizer] lr`` in
TOML and ``--optimizer.lr`` on the command line.

Nothing is validated before all three sources are merged, so a flag can repair a file.
"""

import contextlib
import dataclasses
import difflib
import functools
import io
import itertools
import operator
import re
import tomllib
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import tomli_w

Config = TypeVar("Config")
_Flags = dict[str, list[str]]  # the words after each flag
_NAMES = {bool: "true or false", str: "text", Path: "a path", int: "an int", float: "a float"}
_FLAG = re.compile(r"--[A-Za-z]")


class ConfigError(ValueError):
    """A configuration cannot be used. The message is one line for the person who wrote it."""


class _Leaf(NamedTuple):
    type: Any
    default: Any  # dataclasses.MISSING where the user must give a value


def load_config(cls: type[Config], argv: list[str], *, prog: str, description: str) -> Config:
    """Make a configuration from its defaults, ``--config`` files and dotted flags, in this order.

    A bool takes ``true`` or ``false``, no value (true), or ``no-`` before its name (false). Of a
    flag given twice the last counts; ``--config`` may be given several times. ``--help`` prints
    all flags and exits.

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
        moe_train.load_config.ConfigError: unknown option --step; nearest: --steps
    """
    leaves = _leaves(cls)
    values = {key: leaf.default for key, leaf in leaves.items()}
    if any(word in ("-h", "--help") for word in argv):
        about = f"{description} Options may also stand in a TOML file: --config FILE."
        _parse(_mirror(cls, values), ["--help"], prog, about)
    files, flags = _split(argv, leaves)
    for file in files:
        values |= _read_file(file, leaves)
    missing = [k for k, value in values.items() if value is dataclasses.MISSING and k not in flags]
    if missing:
        raise ConfigError(f"{missing[0]} has no default: set it in the file or with --{missing[0]}")
    if flags:
        values |= _read_flags(cls, flags, leaves, values)
    return _build(cls, values)


def from_dict(cls: type[Config], tree: Mapping[str, Any], *, source: str = "config") -> Config:
    """Make a configuration from nested plain values, such as `to_dict` returns.

    Args:
        cls: The root dataclass of the tree.
        tree: Values by field name; what is absent keeps its default.
        source: What messages call the place that the values come from.

    Raises:
        ConfigError: If a key is unknown, a value has the wrong type or a dataclass refuses it.
    """
    leaves = _leaves(cls)
    values = {key: leaf.default for key, leaf in leaves.items()} | _flatten(tree, leaves, source)
    missing = [key for key, value in values.items() if value is dataclasses.MISSING]
    if missing:
        raise ConfigError(f"{source}: {missing[0]} is missing and has no default")
    return _build(cls, values)


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
    for key, leaf in _leaves(type(config)).items():
        *sections, name = key.split(".")
        section = functools.reduce(operator.getitem, sections, tree)
        if section[name] == "None" and _alternatives(leaf.type)[1]:
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
    olds, news = dict(_walk(old)), dict(_walk(new))
    lines = []
    for key in [*news, *(key for key in olds if key not in news)]:
        before, after = (repr(t[key]) if key in t else "absent" for t in (olds, news))
        if before != after:
            lines.append(f"{key}: {before} -> {after}")
    return lines


def _fields(cls: Any, prefix: str) -> list[tuple[dataclasses.Field[Any], str, Any]]:
    """Return each field with its dotted name and its type, of which hints may be strings."""
    hints = get_type_hints(cls)
    return [(f, prefix + f.name, hints[f.name]) for f in dataclasses.fields(cls) if f.init]


def _leaves(cls: Any, default: Any = dataclasses.MISSING, prefix: str = "") -> dict[str, _Leaf]:
    """Flatten a dataclass to its leaves by dotted name; ``default`` is an instance, if known."""
    leaves = {}
    for field, key, kind in _fields(cls, prefix):
        if default is not dataclasses.MISSING:
            value = getattr(default, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            value = field.default
        if dataclasses.is_dataclass(kind):
            leaves |= _leaves(kind, value, f"{key}.")
        else:
            leaves[key] = _Leaf(kind, value)
    return leaves


def _build(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    arguments = {}
    for field, key, kind in _fields(cls, prefix):
        nested = dataclasses.is_dataclass(kind)
        arguments[field.name] = _build(kind, values, f"{key}.") if nested else values[key]
    try:
        return cls(**arguments)
    except ValueError as error:
        section = f"{prefix[:-1]}: " if prefix else ""
        raise ConfigError(section + _one_line(error)) from error


def _mirror(cls: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Copy a dataclass without its validation, with ``values`` as its defaults.

    tyro makes an instance as soon as it has parsed the flags. With a copy, the real class is
    made once, by `_build`, and its errors look the same whichever source the value came from.
    """
    fields = []
    for field, key, kind in _fields(cls, prefix):
        if dataclasses.is_dataclass(kind):
            part = _mirror(kind, values, f"{key}.")
            fields.append((field.name, part, dataclasses.field(default_factory=part)))
        elif values[key] is dataclasses.MISSING:
            fields.append((field.name, kind, dataclasses.field()))
        else:
            fields.append((field.name, kind, dataclasses.field(default=values[key])))
    mirror = dataclasses.make_dataclass(cls.__name__, fields, kw_only=True)
    mirror.__doc__, mirror.__module__ = cls.__doc__, cls.__module__
    return mirror


def _read_file(file: str, leaves: Mapping[str, _Leaf]) -> dict[str, Any]:
    try:
        tree = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"{file} is not TOML: {_one_line(error)}") from error
    return _flatten(tree, leaves, file)


def _flatten(
    tree: Mapping[str, Any], leaves: Mapping[str, _Leaf], source: str, prefix: str = ""
) -> dict[str, Any]:
    sections = {key[: m.start()] for key in leaves for m in re.finditer(r"\.", key)}
    values = {}
    for name, value in tree.items():
        key = prefix + name
        if key in leaves:
            values[key] = _convert(value, leaves[key].type, source, key)
        elif key in sections and isinstance(value, Mapping):
            values |= _flatten(value, leaves, source, f"{key}.")
        elif key in sections:
            raise ConfigError(f"{source}: {key} is a section [{key}], got {value!r}")
        else:
            raise ConfigError(f"{source}: unknown key {key}{_nearest(key, [*leaves, *sections])}")
    return values


def _convert(value: Any, kind: Any, source: str, key: str) -> Any:
    alternatives, optional = _alternatives(kind)
    if optional and (value is None or value == "None"):
        return None
    for one in alternatives:
        try:
            return _convert_one(value, one)
        except TypeError:
            continue
    raise ConfigError(f"{source}: {key} must be {_describe(kind)}, got {value!r}")


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


def _split(argv: Sequence[str], leaves: Mapping[str, _Leaf]) -> tuple[list[str], _Flags]:
    """Sort the words of the command line by option, and refuse what tyro would not know.

    Returns:
        The files after ``--config``, and the words after each flag by dotted name.
    """
    names = {key.replace("_", "-"): key for key in leaves}
    files: list[str] = []
    flags: _Flags = {}
    for option, words in _group(argv):
        name = option[2:].replace("_", "-")
        positive = re.sub(r"(^|\.)no-([^.]+)$", r"\1\2", name)
        if name == "config" and name not in names:
            if len(words) != 1:
                raise ConfigError(f"--config takes one file, got {' '.join(words) or 'nothing'}")
            files += words
        elif name in names:
            flags[names[name]] = words
        elif leaves.get(names.get(positive, ""), _Leaf(None, None)).type is bool and not words:
            flags[names[positive]] = ["false"]
        else:
            raise ConfigError(f"unknown option {option}{_nearest(name, [*names, 'config'], '--')}")
    return files, flags


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


def _read_flags(
    cls: Any, flags: _Flags, leaves: Mapping[str, _Leaf], values: dict[str, Any]
) -> dict[str, Any]:
    words = [_tyro_words(key, flags[key], leaves[key].type) for key in flags]
    parsed = _parse(_mirror(cls, values), list(itertools.chain(*words)))
    if parsed is not None:
        return {key: operator.attrgetter(key)(parsed) for key in flags}
    for key, got in flags.items():  # which one was it? Each is tried alone
        kind = leaves[key].type
        alone = dataclasses.make_dataclass("Alone", [("value", kind)])
        if _parse(alone, _tyro_words("value", got, kind)) is None:
            found = " ".join(got) or "nothing"
            raise ConfigError(f"--{key} must be {_describe(kind)}, got {found!r}")
    raise ConfigError(f"cannot read the options {' '.join('--' + key for key in flags)}")


def _tyro_words(key: str, words: list[str], kind: Any) -> list[str]:
    if bool in _alternatives(kind)[0]:
        words = [word.capitalize() for word in words or ["true"]]
    option = "--" + key.replace("_", "-")
    # With "=", a value may itself begin with a hyphen.
    return [f"{option}={words[0]}"] if len(words) == 1 else [option, *words]


def _parse(cls: Any, words: list[str], prog: str = "", description: str = "") -> Any:
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


def _nearest(key: str, known: Iterable[str], dashes: str = "") -> str:
    """Name the known keys most like ``key``: by spelling, or with the same last part."""
    known = list(dict.fromkeys(known))
    last = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == last or k.startswith(f"{key}.")]
    near += _most_like(key, {k: k for k in known}, cutoff=0.7)
    near = near or _most_like(last, {k.rpartition(".")[2]: k for k in known}, cutoff=0.6)
    names = ", ".join(dashes + name for name in list(dict.fromkeys(near))[:3])
    return f"; nearest: {names}" if names else f"; there are: {', '.join(sorted(known)[:8])}, ..."


def _most_like(word: str, known: Mapping[str, str], cutoff: float) -> list[str]:
    likeness = {k: difflib.SequenceMatcher(None, word, k).ratio() for k in known}
    best = max(likeness.values())
    near = [k for k in known if likeness[k] >= max(cutoff, best - 0.05)]
    # A mistyped end is the likelier slip, so among equals the beginning leads.
    near.sort(key=lambda k: (likeness[k], word.startswith(k)), reverse=True)
    return [known[k] for k in near]


def _alternatives(kind: Any) -> tuple[list[Any], bool]:
    """Split ``A | B | None`` into its types and whether None is one of them."""
    if get_origin(kind) in (Union, types.UnionType):
        members = get_args(kind)
        return [m for m in members if m is not types.NoneType], types.NoneType in members
    return [kind], False


def _describe(kind: Any) -> str:
    alternatives, optional = _alternatives(kind)
    words = []
    for one in alternatives:
        members = [a for a in get_args(one) if a is not Ellipsis]
        if get_origin(one) is Literal:
            words.append(f"one of {', '.join(map(repr, members))}")
        elif get_origin(one) is tuple:
            count = "" if Ellipsis in get_args(one) else f"{len(members)} "
            words.append(f"{count}values ({', '.join(map(_describe, members))})")
        else:
            words.append(_NAMES.get(one, str(one)))
    return " or ".join([*words, "None"] if optional else words)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def _walk(tree: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _walk(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
