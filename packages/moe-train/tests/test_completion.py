"""A shell completes every command, option and value."""

import shutil
import subprocess

import pytest
from moe_train.commands.completion import entries
from moe_train.completion import SHELLS
from moe_train.config import RunConfig
from moe_train.load_config.tree import leaves_of


@pytest.fixture(scope="module")
def found():
    return entries()


def complete(script: str, *words: str) -> list[str]:
    """Return what bash offers for the last word."""
    program = (
        f'{script}\nshift 0; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _moe_train; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-c", program, "bash", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["moe-train", "ru"], {"run"}),
        (["moe-train", "--v"], {"--version"}),
        (["moe-train", "run", "--optimizer.beta"], {"--optimizer.beta1", "--optimizer.beta2"}),
        (["moe-train", "run", "--train.device", ""], {"auto", "cpu", "cuda"}),
        (["moe-train", "run", "--routing.bias", "f"], {"false"}),
        (["moe-train", "config", "di"], {"diff"}),
        (["moe-train", "config", "print", "--output", "t"], {"toml"}),
        (["moe-train", "config", "diff", "a", "b", "--j"], {"--json"}),
        (["moe-train", "doctor", "--q"], {"--quick"}),
        (["moe-train", "completion", "--sh"], {"--shell"}),
        (["moe-train", "nothing", "--x"], set()),
    ],
)
def test_bash_offers_what_fits(found, words, wanted) -> None:
    assert set(complete(SHELLS["bash"](found), *words)) == wanted


def test_every_flag_of_a_run_is_offered(found) -> None:
    offered = complete(SHELLS["bash"](found), "moe-train", "run", "--")
    assert set(offered) == {
        *(f"--{key.replace('_', '-')}" for key in leaves_of(RunConfig)),
        "--config", "--preset", "--help",
    }  # fmt: skip


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_can_read_its_script(found, shell, tmp_path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(SHELLS[shell](found))
    subprocess.run([shell, "-n", str(script)], check=True)


def test_every_shell_knows_every_command_and_flag(found) -> None:
    for make in SHELLS.values():
        script = make(found)
        for key, entry in found.items():
            assert key.split()[-1] in script
            assert all(flag.name.removeprefix("--") in script for flag in entry.flags)
