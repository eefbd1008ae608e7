"""``moe-train config``: what the settings are, where they come from, and how two runs differ."""

import json
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w

from moe_train.commands.options import read_options, say, say_json
from moe_train.config import RunConfig
from moe_train.config.kinds import EFFECTS, kind_of
from moe_train.load_config import (
    ConfigError,
    from_dict,
    preset_names,
    read_preset_tree,
    read_tree,
    to_dict,
    to_toml,
)
from moe_train.load_config.explain import about_sections, explain
from moe_train.load_config.names import nearest
from moe_train.load_config.tree import walk


@dataclass(frozen=True, kw_only=True, slots=True)
class PrintOptions(RunConfig):
    """The settings of a run.

    Attributes:
        output: Lines with the source of each value, TOML to read back, or JSON with sources.
    """

    output: Literal["lines", "toml", "json"] = "lines"


@dataclass(frozen=True, kw_only=True, slots=True)
class ExplainOptions:
    """What a setting is.

    Attributes:
        name: A setting, or a section; without it, all.
        json: Print JSON.
    """

    name: str = ""
    json: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DiffOptions:
    """How two configurations differ.

    Attributes:
        a: A TOML file, a run's folder, or ``preset:NAME``.
        b: Another.
        json: Print JSON.
    """

    a: str
    b: str
    json: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class PresetsOptions:
    """Which presets there are.

    Attributes:
        json: Print JSON.
    """

    json: bool = False


FLAGS = {
    "print": PrintOptions,
    "explain": ExplainOptions,
    "diff": DiffOptions,
    "presets": PresetsOptions,
}
USAGE = """usage: moe-train config COMMAND [OPTIONS]

commands:
  print          the settings that a run with these options has, and where each comes from
  explain [NAME] what a setting or a section is; all without a name
  diff A B       how two configurations differ, and whether that changes the mathematics
  presets        shapes that --preset NAME takes

examples:
  moe-train config print --config a.toml --optimizer.lr 0.002
  moe-train config print --preset NAME --output toml > a.toml
  moe-train config explain optimizer.lr
  moe-train config diff runs/a runs/b"""


def main(argv: list[str]) -> int:
    """Do one of the four."""
    name, rest = (argv[0], argv[1:]) if argv else ("--help", [])
    if name in ("-h", "--help"):
        say(USAGE)
        return 0
    work = {"print": _print, "explain": _explain, "diff": _diff, "presets": _presets}
    if name not in work:
        raise ConfigError(f"unknown command 'config {name}'{nearest(name, work)}")
    return work[name](rest)


def _print(argv: list[str]) -> int:
    config, sources = read_options(
        PrintOptions, argv, prog="moe-train config print",
        about="Print the settings that a run with these options has, and where each comes from.",
        examples=(
            "moe-train config print --config a.toml --optimizer.lr 0.002",
            "moe-train config print --model.dim 256 --output toml > a.toml",
        ),
    )  # fmt: skip
    plain = to_dict(config)
    output = plain.pop("output")
    if output == "toml":
        say(to_toml(from_dict(RunConfig, plain)).rstrip())
        return 0
    values = {key: (value, sources[key]) for key, value in walk(plain)}
    if output == "json":
        say_json({key: {"value": v, "source": source} for key, (v, source) in values.items()})
        return 0
    texts = {key: f"{key} = {value_text(v)}" for key, (v, _) in values.items()}
    width = min(60, max(map(len, texts.values())))
    for key, (_, source) in values.items():
        say(f"{texts[key]:{width}}  # {source}")
    return 0


def _explain(argv: list[str]) -> int:
    options = read_options(
        ExplainOptions, argv, prog="moe-train config explain", places=("name",),
        about="Say what a setting is, which values it has and what it changes.",
        examples=(
            "moe-train config explain optimizer.lr",
            "moe-train config explain routing",
            "moe-train config explain",
        ),
    ).config  # fmt: skip
    settings, sections = explain(RunConfig), about_sections(RunConfig)
    name = options.name.strip("-").replace("-", "_")
    found = {k: s for k, s in settings.items() if not name or (k + ".").startswith(name + ".")}
    if not found:
        raise ConfigError(f"unknown setting {options.name}{nearest(name, [*settings, *sections])}")
    if options.json:
        say_json([
            {**s._asdict(), "default": _plain_default(s.default), "changes": kind_of(k)}
            for k, s in found.items()
        ])  # fmt: skip
        return 0
    section = ""
    for key, setting in found.items():
        if key.rpartition(".")[0] != section:
            section = key.rpartition(".")[0]
            say(f"[{section}]  {sections[section]}\n")
        default = "" if setting.default is MISSING else f"; default {value_text(setting.default)}"
        say(f"{key}: {setting.values}{default}\n  {setting.about}\n  {EFFECTS[kind_of(key)]}\n")
    return 0


def _diff(argv: list[str]) -> int:
    options = read_options(
        DiffOptions, argv, prog="moe-train config diff", places=("a", "b"),
        about="Say how two configurations differ, and whether that changes the mathematics. "
        "Exits with 1 if they differ.",
        examples=("moe-train config diff runs/a runs/b", "moe-train config diff a.toml runs/b"),
    ).config  # fmt: skip
    before, after = (dict(walk(_tree(where))) for where in (options.a, options.b))
    rows = [
        {"key": key, "changes": kind_of(key), "a": before.get(key), "b": after.get(key)}
        for key in before
        if before[key] != after[key]
    ]
    if options.json:
        say_json(rows)
        return int(bool(rows))
    for kind, effect in EFFECTS.items():
        chosen = [row for row in rows if row["changes"] == kind]
        if chosen:
            say(f"{kind} ({effect}):")
        for row in chosen:
            say(f"  {row['key']}: {value_text(row['a'])} -> {value_text(row['b'])}")
    if not rows:
        say("they are the same")
    return int(bool(rows))


def _presets(argv: list[str]) -> int:
    options = read_options(
        PresetsOptions, argv, prog="moe-train config presets",
        about="List the shapes that --preset NAME takes.",
        examples=("moe-train config presets", "moe-train run --preset NAME"),
    ).config  # fmt: skip
    trees = {name: read_preset_tree(name) for name in preset_names()}
    if options.json:
        say_json(trees)
        return 0
    width = max(map(len, trees), default=0)
    for name, tree in trees.items():
        model = from_dict(RunConfig, tree, source=name).model
        say(
            f"{name:{width}}  {model.num_layers} blocks of width {model.dim}, "
            f"{model.num_experts} experts of which {model.top_k}"
        )
    if not trees:
        say("there are none")
    return 0


def _tree(where: str) -> dict[str, Any]:
    """Return the settings of a file, a run or a preset, with the defaults of what is absent."""
    path = Path(where)
    if where.startswith("preset:"):
        tree = read_preset_tree(where.removeprefix("preset:"))
    else:
        tree = read_tree(str(path / "config.toml" if path.is_dir() else path))
    return to_dict(from_dict(RunConfig, tree, source=where))


def value_text(value: Any) -> str:
    """Write a value as TOML does, and None, which TOML lacks, as on the command line."""
    if value is None:
        return "None"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(value_text, value))}]"
    return tomli_w.dumps({"v": value}).strip().removeprefix("v = ")


def _plain_default(default: Any) -> Any:
    return None if default is MISSING else json.loads(json.dumps(default, default=str))
