"""The command line."""

from moe_train.cli import command


def test_unknown_command_and_help(capsys) -> None:
    assert command(["fly"]) == 2
    assert "unknown command 'fly'" in capsys.readouterr().err
    assert command([]) == 0
    assert "moe-train run" in capsys.readouterr().out
