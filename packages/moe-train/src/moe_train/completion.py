"""Completion for shells: what each command takes, written out as a script.

A script holds every name, so that a key press starts no Python. It is made again after an update.
"""

from typing import Any, Literal, NamedTuple, get_args, get_origin

from moe_train.load_config.explain import explain
from moe_train.load_config.tree import leaves_of
from moe_train.load_config.values import alternatives_of


class Flag(NamedTuple):
    """A flag of a command.

    Attributes:
        name: With its hyphens.
        choices: The values that it takes, if they can be listed.
        about: A line about it.
    """

    name: str
    choices: tuple[str, ...]
    about: str


class Entry(NamedTuple):
    """A command, or a subcommand such as ``config print``.

    Attributes:
        summary: A line about it.
        flags: Its flags.
    """

    summary: str
    flags: list[Flag]


def flags_of(cls: type | None) -> list[Flag]:
    """Return the flags whose values the fields of a dataclass are."""
    if cls is None:
        return []
    about = explain(cls)
    flags = [
        Flag(f"--{key.replace('_', '-')}", _choices(leaf.type), about[key].about)
        for key, leaf in leaves_of(cls).items()
    ]
    if any("." in flag.name for flag in flags):
        flags += [Flag("--config", (), "A TOML file of options."), Flag("--preset", (), "A shape.")]
    return [*flags, Flag("--help", (), "Show the options and examples.")]


def _choices(kind: Any) -> tuple[str, ...]:
    choices: list[str] = []
    for one in alternatives_of(kind)[0]:
        if get_origin(one) is Literal:
            choices += map(str, get_args(one))
        elif one is bool:
            choices += ["true", "false"]
    return tuple(choices)


def bash(entries: dict[str, Entry]) -> str:
    """Return the script for bash."""
    cases = _cases(entries, lambda names: f'COMPREPLY=($(compgen -W "{names}" -- "$current"))')
    return f"""# moe-train completion for bash; made by `moe-train completion bash`
_moe_train() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}"
    local key="${{COMP_WORDS[1]}}" at=$COMP_CWORD
    COMPREPLY=()
{cases}
}}
complete -o bashdefault -o default -F _moe_train moe-train
"""


def zsh(entries: dict[str, Entry]) -> str:
    """Return the script for zsh."""
    cases = _cases(entries, lambda names: f"compadd -- {names}")
    return f"""#compdef moe-train
# moe-train completion for zsh; made by `moe-train completion zsh`
_moe_train() {{
    local current="${{words[CURRENT]}}" previous="${{words[CURRENT-1]}}"
    local key="${{words[2]}}" at=$((CURRENT - 1))
{cases}
    _files
}}
compdef _moe_train moe-train
"""


def fish(entries: dict[str, Entry]) -> str:
    """Return the script for fish."""
    lines = ["# moe-train completion for fish; made by `moe-train completion fish`"]
    tops = {key.split()[0]: entry.summary for key, entry in entries.items()}
    lines += [_fish("__fish_use_subcommand", f"-a {name}", text) for name, text in tops.items()]
    for key, entry in entries.items():
        name, _, inner = key.partition(" ")
        if inner:
            lines.append(_fish(f"__fish_seen_subcommand_from {name}", f"-a {inner}", ""))
        seen = "; and ".join(f"__fish_seen_subcommand_from {word}" for word in key.split())
        for flag in entry.flags:
            values = f" -xa '{' '.join(flag.choices)}'" if flag.choices else ""
            lines.append(_fish(seen, f"-l {flag.name.removeprefix('--')}{values}", flag.about))
    return "\n".join(lines) + "\n"


def _fish(when: str, what: str, about: str) -> str:
    quoted = about.replace("\\", "\\\\").replace("'", "\\'")
    return f"complete -c moe-train -n '{when}' {what} -d '{quoted}'"


def _cases(entries: dict[str, Entry], offer: Any) -> str:
    """Return the body that bash and zsh share: commands, subcommands, values, then flags."""
    names = list(dict.fromkeys(key.split()[0] for key in entries))
    inner: dict[str, list[str]] = {}
    for key in entries:
        if " " in key:
            name, _, sub = key.partition(" ")
            inner.setdefault(name, []).append(sub)
    lines = [
        "if [[ $at == 1 ]]; then",
        f"    {offer(' '.join([*names, '--help', '--version']))}; return",
        "fi",
    ]
    for name, subs in inner.items():
        word = "${COMP_WORDS[2]}${words[3]}"  # one of the two is empty in either shell
        lines += [
            f'if [[ $key == "{name}" ]]; then',
            f"    if [[ $at == 2 ]]; then {offer(' '.join([*subs, '--help']))}; return; fi",
            f'    key="{name} {word}"',
            "fi",
        ]
    lines.append('case "$key $previous" in')
    for key, entry in entries.items():
        lines += [
            f'    "{key} {flag.name}") {offer(" ".join(flag.choices))}; return ;;'
            for flag in entry.flags
            if flag.choices
        ]
    lines += ["esac", "if [[ $current == -* ]]; then", '    case "$key" in']
    for key, entry in entries.items():
        flags = " ".join(flag.name for flag in entry.flags)
        lines.append(f'        "{key}") {offer(flags)}; return ;;')
    lines += ["    esac", "fi"]
    return "\n".join("    " + line for line in lines)


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
