"""``moe-train completion``: a script that lets a shell complete commands, options and values."""

from dataclasses import dataclass
from typing import Literal

from moe_train.commands.options import read_options, say
from moe_train.commands.table import COMMANDS
from moe_train.completion import SHELLS, Entry, flags_of


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOptions:
    """The script of a shell.

    Attributes:
        shell: Which shell it is for.
    """

    shell: Literal["bash", "zsh", "fish"]


FLAGS = {"": CompletionOptions}


def main(argv: list[str]) -> int:
    """Print the script."""
    options = read_options(
        CompletionOptions, argv, prog="moe-train completion", places=("shell",),
        about="Print a script that completes commands, options and values.",
        examples=(
            "moe-train completion bash > ~/.local/share/bash-completion/completions/moe-train",
            'moe-train completion zsh > "${fpath[1]}/_moe-train"',
            "moe-train completion fish > ~/.config/fish/completions/moe-train.fish",
        ),
    ).config  # fmt: skip
    say(SHELLS[options.shell](entries()).rstrip())
    return 0


def entries() -> dict[str, Entry]:
    """Return every command and subcommand with its flags."""
    found = {}
    for command in COMMANDS.values():
        for sub, cls in command.load().FLAGS.items():
            found[f"{command.name} {sub}".strip()] = Entry(command.summary, flags_of(cls))
    return found
