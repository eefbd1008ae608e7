"""Laws of the configuration loader, on trees made up for them."""

import dataclasses
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_train.load_config import (
    ConfigError,
    diff_configs,
    from_dict,
    load_config,
    to_dict,
    to_toml,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mesh:
    """How ranks are laid out.

    Attributes:
        ep: Ranks that share the experts.
        pp: Stages of the pipeline.
    """

    ep: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        if self.ep < 1:
            raise ValueError(f"ep must be at least 1,\n  got {self.ep}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimizer:
    lr: float = 3e-3
    betas: tuple[float, float] = (0.9, 0.95)
    max_norm: float | None = 1.0
    name: Literal["adamw", "sgd"] = "adamw"


@dataclass(frozen=True, kw_only=True, slots=True)
class Deep:
    optimizer: Optimizer = field(default_factory=lambda: Optimizer(lr=7.0))
    compile: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    steps: int = 100
    run_dir: Path = Path("runs")
    prompt: str = ""
    note: str | None = None
    sizes: tuple[int, ...] = (1, 2)
    checkpoint_every: int | None = None
    mesh: Mesh = Mesh()
    deep: Deep = Deep()

    def __post_init__(self) -> None:
        if self.mesh.ep > self.steps:
            raise ValueError(f"mesh.ep {self.mesh.ep} exceeds steps {self.steps}")


def load(*argv: str, cls: type[Any] = Config) -> Any:
    return load_config(cls, list(argv), prog="run", description="Train.")


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


text = st.text(max_size=12).filter(lambda t: t != "None")
floats = st.floats(allow_nan=False)
configs = st.builds(
    Config,
    steps=st.integers(9, 2**40),
    run_dir=st.text("ab./ é", min_size=1, max_size=8).map(Path),
    prompt=text,
    note=st.none() | text,
    sizes=st.lists(st.integers(-9, 9), max_size=4).map(tuple),
    checkpoint_every=st.none() | st.integers(-3, 3),
    mesh=st.builds(Mesh, ep=st.integers(1, 9), pp=st.integers(-5, 5)),
    deep=st.builds(
        Deep,
        optimizer=st.builds(
            Optimizer,
            lr=floats,
            betas=st.tuples(floats, floats),
            max_norm=st.none() | floats,
            name=st.sampled_from(["adamw", "sgd"]),
        ),
        compile=st.booleans(),
    ),
)


@given(config=configs)
def test_a_dumped_config_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, config: Config
) -> None:
    file = tmp_path_factory.getbasetemp() / "dump.toml"
    file.write_text(to_toml(config), encoding="utf-8")
    assert load("--config", str(file)) == config
    assert from_dict(Config, to_dict(config)) == config


def _flags(tree: dict[str, Any], prefix: str = "") -> list[str]:
    words = []
    for name, value in tree.items():
        if isinstance(value, dict):
            words += _flags(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            words += [f"--{prefix}{name}", *map(str, value)] if value else []
        else:
            words += [f"--{prefix}{name}={value}"]
    return words


@given(config=configs.filter(lambda c: c.sizes))
def test_flags_reach_every_field_and_beat_the_defaults(config: Config) -> None:
    assert load(*_flags(to_dict(config))) == config


def test_defaults_yield_to_the_file_and_the_file_to_flags(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "steps = 7\nprompt = 'file'\n[deep.optimizer]\nlr = 1")
    config = load("--mesh.ep", "2", "--config", file, "--steps=9")
    assert config == Config(
        steps=9,
        prompt="file",
        mesh=Mesh(ep=2),
        deep=Deep(optimizer=Optimizer(lr=1.0)),
    )
    assert type(config.deep.optimizer.lr) is float
    second = write(tmp_path / "b.toml", "steps = 8")
    assert load("--config", file, f"--config={second}") == dataclasses.replace(
        config, steps=8, mesh=Mesh()
    )


def test_the_default_of_a_section_is_its_instance_not_its_class() -> None:
    assert load("--deep.compile").deep == Deep(optimizer=Optimizer(lr=7.0), compile=True)


@pytest.mark.parametrize("name", ["--checkpoint_every", "--checkpoint-every"])
def test_hyphen_and_underscore_name_the_same_option(name: str) -> None:
    assert load(name, "5").checkpoint_every == 5
    assert load(name, "5", name, "None").checkpoint_every is None


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--deep.compile"], True),
        (["--deep.compile", "true"], True),
        (["--deep.compile=False"], False),
        (["--deep.no-compile"], False),
        (["--deep.compile", "--deep.no-compile"], False),
    ],
)
def test_a_bool_can_be_switched_on_and_off(words: list[str], value: bool) -> None:
    assert load(*words).deep.compile is value


def test_a_flag_repairs_what_the_file_alone_would_break(tmp_path: Path) -> None:
    file = write(tmp_path / "a.toml", "[mesh]\nep = 0")
    assert load("--config", file, "--mesh.ep", "3").mesh.ep == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mesh.epp", "2"], "unknown option --mesh.epp; nearest: --mesh.ep, --mesh.pp"),
        (["--mesh.epp=2"], "unknown option --mesh.epp; nearest: --mesh.ep, --mesh.pp"),
        (["--ep", "2"], "unknown option --ep; nearest: --mesh.ep"),
        (["--stpes", "2"], "unknown option --stpes; nearest: --steps"),
        (
            ["--deep.optimizer", "2"],
            "unknown option --deep.optimizer; nearest: --deep.optimizer.lr, "
            "--deep.optimizer.betas, --deep.optimizer.max-norm",
        ),
        (["--no-steps"], "unknown option --no-steps; nearest: --steps"),
        (["--confgi", "x"], "unknown option --confgi; nearest: --config"),
        (["run.toml"], "unexpected argument 'run.toml': options are written --name value"),
        (["--mesh.ep", "two"], "--mesh.ep must be an int, got 'two'"),
        (["--mesh.ep", "2.5"], "--mesh.ep must be an int, got '2.5'"),
        (["--steps", "3", "--mesh.ep"], "--mesh.ep must be an int, got 'nothing'"),
        (["--mesh.ep", "2", "3"], "--mesh.ep must be an int, got '2 3'"),
        (["--checkpoint-every", "x"], "--checkpoint_every must be an int or None, got 'x'"),
        (["--deep.compile", "maybe"], "--deep.compile must be true or false, got 'maybe'"),
        (
            ["--deep.optimizer.name", "adam"],
            "--deep.optimizer.name must be one of 'adamw', 'sgd', got 'adam'",
        ),
        (
            ["--deep.optimizer.betas", "0.9"],
            "--deep.optimizer.betas must be 2 values (a float, a float), got '0.9'",
        ),
        (["--mesh.ep", "0"], "mesh: ep must be at least 1, got 0"),
        (["--steps", "2", "--mesh.ep", "3"], "mesh.ep 3 exceeds steps 2"),
        (["--config"], "--config takes one file, got nothing"),
        (["--config", "a", "b"], "--config takes one file, got a b"),
        (["--config", "/none.toml"], "cannot read /none.toml: No such file or directory"),
    ],
)
def test_a_bad_option_gives_one_line_and_no_output(
    words: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load(*words)
    assert str(error.value) == message
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[mesh]\nepp = 2", "unknown key mesh.epp; nearest: mesh.ep, mesh.pp"),
        ("[mehs]\nep = 2", "unknown key mehs; nearest: mesh"),
        ("[deep.optimiser]\nlr = 2", "unknown key deep.optimiser; nearest: deep.optimizer"),
        ("lr = 2", "unknown key lr; nearest: deep.optimizer.lr"),
        ("mesh = 3", "mesh is a section [mesh], got 3"),
        ("[steps]\nx = 1", "steps must be an int, got {'x': 1}"),
        ("steps = '5'", "steps must be an int, got '5'"),
        ("steps = 5.0", "steps must be an int, got 5.0"),
        ("steps = true", "steps must be an int, got True"),
        ("[deep]\ncompile = 1", "deep.compile must be true or false, got 1"),
        ("run_dir = 1", "run_dir must be a path, got 1"),
        ("sizes = [1, 'a']", "sizes must be values (an int), got [1, 'a']"),
        (
            "[deep.optimizer]\nname = 'adam'",
            "deep.optimizer.name must be one of 'adamw', 'sgd', got 'adam'",
        ),
        (
            "[deep.optimizer]\nbetas = [1, 2, 3]",
            "deep.optimizer.betas must be 2 values (a float, a float), got [1, 2, 3]",
        ),
        (
            "[deep.optimizer]\nmax_norm = 'x'",
            "deep.optimizer.max_norm must be a float or None, got 'x'",
        ),
    ],
)
def test_a_bad_file_gives_one_line_with_file_and_key(
    tmp_path: Path, toml: str, message: str
) -> None:
    file = write(tmp_path / "run.toml", toml)
    with pytest.raises(ConfigError) as error:
        load("--config", file)
    assert str(error.value) == f"{file}: {message}"


@pytest.mark.parametrize("content", [b"steps = ", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"^\S*x\.toml is not TOML: [^\n]+$"):
        load("--config", str(tmp_path / "x.toml"))


@dataclass(frozen=True, kw_only=True)
class Needy:
    path: Path
    steps: int = 1


def test_what_has_no_default_must_be_given(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^path has no default: set it in the file or with"):
        load("--steps", "2", cls=Needy)
    assert load("--path", "x", cls=Needy) == Needy(path=Path("x"))
    file = write(tmp_path / "a.toml", "path = 'y'")
    assert load("--config", file, "--steps=4", cls=Needy) == Needy(path=Path("y"), steps=4)
    with pytest.raises(ConfigError, match="--steps must be an int, got 'z'"):
        load("--path", "x", "--steps", "z", cls=Needy)
    with pytest.raises(ConfigError, match="config: path is missing"):
        from_dict(Needy, {})


def test_help_lists_every_option_with_its_text_and_default(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as stop:
        load("--mesh.ep", "9", "--help")
    out = capsys.readouterr().out
    assert stop.value.code == 0
    for words in ("--mesh.ep INT", "Ranks that share the experts", "(default: 7.0)", "--config"):
        assert words in out


def test_a_none_that_is_not_the_default_survives_and_the_text_none_is_refused() -> None:
    config = Config(deep=Deep(optimizer=Optimizer(max_norm=None)))
    assert 'max_norm = "None"' in to_toml(config)
    assert "note" not in to_toml(config)
    with pytest.raises(ValueError, match="note: the string 'None'"):
        to_toml(Config(note="None"))


def test_a_diff_names_changed_added_and_removed_leaves_and_nothing_else() -> None:
    old = to_dict(Config())
    new = to_dict(Config(deep=Deep(optimizer=Optimizer(lr=0.001, betas=(0.8, 0.95)))))
    del old["steps"]
    old["mesh"]["tp"] = 2
    assert diff_configs(old, new) == [
        "steps: absent -> 100",
        "deep.optimizer.lr: 7.0 -> 0.001",
        "deep.optimizer.betas: [0.9, 0.95] -> [0.8, 0.95]",
        "mesh.tp: 2 -> absent",
    ]
    assert diff_configs(new, new) == []


def test_the_slow_command_line_library_is_not_imported_without_flags() -> None:
    program = (
        "import sys, dataclasses, moe_train.load_config as m\n"
        "@dataclasses.dataclass\nclass C:\n x: int = 1\n"
        "print(m.load_config(C, [], prog='', description='').x, 'tyro' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["1", "False"]
