"""Which commands there are. Their modules are imported when they are called."""

import importlib
from typing import NamedTuple, Protocol

from moe_train.load_config import ConfigError
from moe_train.load_config.names import nearest


class Module(Protocol):
    """What the module of a command has.

    Attributes:
        FLAGS: By subcommand the dataclass whose fields are its flags, None if it takes none.
    """

    FLAGS: dict[str, type | None]

    def main(self, argv: list[str]) -> int:
        """Do it and return the exit code."""
        ...


class Command(NamedTuple):
    """A command of ``moe-train``.

    Attributes:
        name: On the command line.
        words: What follows the name, for the usage.
        summary: A line about it.
        module: Name of its module.
    """

    name: str
    words: str
    summary: str
    module: str

    def load(self) -> Module:
        """Import the command."""
        return importlib.import_module(f"moe_train.commands.{self.module}")  # pyrefly: ignore


COMMANDS = {
    command.name: command
    for command in (
        Command("run", "", "train, or go on training", "run"),
        Command("eval", "RUN", "the loss of a trained model on held-out text", "eval"),
        Command("generate", "RUN", "text from a trained model", "generate"),
        Command("export", "RUN OUT", "a trained model as Hugging Face keeps it", "export"),
        Command("import", "SOURCE", "begin a run with a model of Hugging Face", "import_model"),
        Command("bench", "", "how fast training steps are here", "bench"),
        Command("report", "RUN", "write RUN/report.html again from what was recorded", "report"),
        Command("data", "build|inspect", "make token shards, look at them", "data"),
        Command("config", "print|explain|diff|presets", "look at settings", "config"),
        Command("doctor", "", "what this machine can do, and what it lacks", "doctor"),
        Command("completion", "bash|zsh|fish", "print a script for your shell", "completion"),
    )
}


def find(name: str) -> Command:
    """Return a command by name.

    Raises:
        ConfigError: If there is none of this name.
    """
    if name not in COMMANDS:
        raise ConfigError(f"unknown command {name!r}{nearest(name, COMMANDS)}")
    return COMMANDS[name]


def usage() -> str:
    """Return the page that ``moe-train --help`` prints."""
    starts = {c: f"{c.name} {c.words}".strip() for c in COMMANDS.values()}
    width = max(map(len, starts.values()))
    lines = [f"  {start:{width}}  {command.summary}" for command, start in starts.items()]
    return "\n".join(
        [
            "usage: moe-train COMMAND [OPTIONS]",
            "",
            "commands:",
            *lines,
            "",
            "`moe-train COMMAND --help` lists the options of a command and shows examples;",
            "`moe-train --version` says which versions these are.",
            "",
            "exit codes: 0 done, or stopped and saved; 1 failed; 2 refused before any work; "
            "130 interrupted",
        ]
    )
