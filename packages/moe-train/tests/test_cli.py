"""The command line: what it says of itself, and what it says of a slip of the pen."""

import subprocess
import sys
from importlib.metadata import version

import pytest
from moe_train.cli import command
from moe_train.commands.table import COMMANDS
from runs import refused

pytestmark = pytest.mark.usefixtures("alone")


def said(capsys, *argv: str) -> str:
    assert command(list(argv)) == 0
    return capsys.readouterr().out


def test_help_names_every_command_and_each_explains_itself_with_examples(capsys) -> None:
    page = said(capsys, "--help")
    assert said(capsys) == page
    for name in COMMANDS:
        assert f"\n  {name}" in page
        try:
            code = command([name, "--help"])
        except SystemExit as stop:
            code = stop.code
        assert not code
        own = capsys.readouterr().out
        assert f"usage: moe-train {name}" in own
        assert "examples:" in own
        assert own.count(f"moe-train {name}") > 1


def test_version_is_that_of_the_package(capsys) -> None:
    assert version("moe-train") in said(capsys, "--version")


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["fly"], ["unknown command 'fly'"]),
        (["rnu"], ["unknown command 'rnu'", "nearest: run"]),
        (["config", "prnt"], ["'config prnt'", "nearest: print"]),
        (["report"], ["RUN is missing", "usage: moe-train report RUN"]),
        (["report", "a", "b"], ["unexpected 'b'", "usage: moe-train report RUN"]),
        (["report", "/nowhere/at/all"], ["/nowhere/at/all"]),
        (["run", "here"], ["unexpected 'here'", "usage: moe-train run"]),
        (["run", "--optimizer.lrr", "1"], ["--optimizer.lrr", "nearest: --optimizer.lr"]),
        (["doctor", "--jso"], ["unknown option --jso", "nearest: --json"]),
        (["completion", "cmd"], ["'bash'", "got 'cmd'"]),
        (["config", "explain", "optimizer.lrr"], ["optimizer.lrr", "optimizer.lr"]),
    ],
)
def test_a_slip_is_one_line_with_the_nearest(capsys, argv, parts) -> None:
    code = command(argv)
    assert code == 2
    refused(capsys, code, *parts)


def test_what_computes_nothing_does_not_wait_for_torch() -> None:
    program = (
        "import sys; from moe_train.cli import command; "
        "command(['--help']); command(['--version']); command(['config', 'print']); "
        "command(['runn']); command(['config', 'explain', 'data']); "
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    program = [sys.executable, "-m", "moe_train", "config", "explain"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
