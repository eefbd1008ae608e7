"""Every setting is checked when it is made, and every setting does something."""

import dataclasses
import inspect
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from moe_train import config
from moe_train.cli import command
from moe_train.config import (
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    TrainConfig,
)
from moe_train.errors import RunError

SECTIONS = [c for c in vars(config).values() if dataclasses.is_dataclass(c)]
FIELDS = {(c.__name__, f.name) for c in SECTIONS for f in dataclasses.fields(c)}
ELSEWHERE = ("moe_train.config", "moe_train.load_config")  # these read every setting
REFUSED = {("MeshConfig", "tp"), ("MeshConfig", "cp")}  # there so that they are refused by name


def test_every_setting_is_read_by_the_program(
    tmp_path, text_folder, tokenizer_file, monkeypatch
) -> None:
    read, shown = set(), set()

    def watch(section: type) -> None:
        plain = section.__getattribute__
        public = [v for k, v in vars(section).items() if not k.startswith("_")]
        shown.update(v.fget.__code__ for v in public if isinstance(v, property))
        shown.update(v.__code__ for v in public if inspect.isfunction(v))

        def look(self, name: str):
            frame = sys._getframe(1)
            while frame.f_code in {*shown, look.__code__}:  # derived: counts where that is read
                frame = frame.f_back
            module = frame.f_globals["__name__"]
            if module.startswith("moe_train.") and not module.startswith(ELSEWHERE):
                read.add((section.__name__, name))
            return plain(self, name)

        monkeypatch.setattr(section, "__getattribute__", look, raising=False)

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    tracker = ModuleType("wandb")
    tracker.__spec__ = ModuleSpec("wandb", None)
    tracker.init = lambda **_: SimpleNamespace(log=lambda *_, **__: None, finish=lambda: None)
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    for section in SECTIONS:
        watch(section)
    settings = {
        "model.dim": 16, "model.num-layers": 1, "model.num-heads": 2, "model.num-kv-heads": 1,
        "model.num-experts": 4, "model.expert-dim": 8, "model.shared-dim": 8, "train.steps": 2,
        "train.sample-bytes": 2, "data.sequence-length": 16, "train.device": "cpu",
        "routing.bias": True, "optimizer.schedule": "cosine", "optimizer.warmup-steps": 1,
        "train.skip-spikes": 9.0, "mesh.dispatcher": "rowwise", "mesh.overflow": "retry",
        "log.wandb": True, "run-dir": tmp_path / "a", "data.path": text_folder,
    }  # fmt: skip
    words = ["run", *(w for name, v in settings.items() for w in (f"--{name}", str(v)))]
    assert command(words) == 0
    (text_folder / "file0.py").write_text("other text\n" * 50)
    assert command([*words, "--data.allow-changed", "True"]) == 0
    latent = {
        "model.attention": "latent", "model.kv-rank": 4, "model.rope-head-dim": 4,
        "model.num-layers": 2, "model.num-dense-layers": 1, "model.dense-dim": 8,
        "run-dir": tmp_path / "b",
    }  # fmt: skip
    assert command([*words, *(w for n, v in latent.items() for w in (f"--{n}", str(v)))]) == 0
    other = ["--run-dir", str(tmp_path / "c"), "--model.vocab-size", "300"]
    other += ["--data.tokenizer", str(tokenizer_file), "--data.eos", "</s>"]
    assert command([*words, *other]) == 0
    assert FIELDS - REFUSED - read == set()
    assert not read & REFUSED


def test_every_setting_is_documented() -> None:
    missing = [
        f"{c.__name__}.{f.name}"
        for c in SECTIONS
        for f in dataclasses.fields(c)
        if f"        {f.name}: " not in (c.__doc__ or "")
    ]
    assert not missing


@pytest.mark.parametrize(
    ("section", "settings", "message"),
    [
        (ModelConfig, {"top_k": 9}, r"top_k must be in 1..num_experts \(8\), got 9"),
        (ModelConfig, {"top_k": 0}, r"top_k must be in 1..num_experts \(8\), got 0"),
        (ModelConfig, {"num_kv_heads": 3}, r"num_kv_heads \(3\) must divide num_heads \(4\)"),
        (ModelConfig, {"dim": 100}, "even multiple of num_heads, got 100 and 4"),
        (ModelConfig, {"num_layers": 0}, "num_layers must be positive, got 0"),
        (MeshConfig, {"tp": 2}, "tp=2: the trainer has no tensor parallelism"),
        (MeshConfig, {"cp": 2}, "cp=2: the trainer has no context parallelism"),
        (MeshConfig, {"pp": 2}, "pp=2: the trainer has no pipeline parallelism"),
        (MeshConfig, {"ep": 0}, "ep must be positive, got 0"),
        (LogConfig, {"profile": "10"}, "profile must be a first and a last step .* got '10'"),
        (LogConfig, {"profile": "5:3"}, "such as 10:13, got '5:3'"),
        (LogConfig, {"profile": "0:3"}, "such as 10:13, got '0:3'"),
        (LogConfig, {"profile": "-1:x"}, "such as 10:13, got '-1:x'"),
        (LogConfig, {"profile": "1:500"}, "at most 100 steps, got 1:500"),
        (LogConfig, {"memory_snapshot": True}, "memory_snapshot needs the steps"),
        (LogConfig, {"nvtx": True, "profile": "1:2"}, "nvtx and profile 1:2 do not go together"),
        (LogConfig, {"window": 5}, "window must be even and at least 4, got 5"),
        (LogConfig, {"gerrymander": 0}, "gerrymander must be positive, got 0"),
        (LogConfig, {"wandb_project": ""}, "wandb_project must not be empty"),
        (OptimizerConfig, {"floor": 2.0}, r"floor must be in \[0, 1\], got 2.0"),
        (OptimizerConfig, {"total_steps": 9}, "total_steps=9 belongs to a schedule that decays"),
        (OptimizerConfig, {"expert_lr": -1}, "expert_lr must be 0 or more, got -1"),
        (TrainConfig, {"ema": 1.0}, r"ema must be in \[0, 1\), got 1.0"),
        (TrainConfig, {"eval_ema": True}, "ema 0 keeps none"),
        (TrainConfig, {"steps": 0}, "steps must be positive, got 0"),
        (TrainConfig, {"save_every": -1}, "save_every must be 0 or more, got -1"),
    ],
)
def test_impossible_settings_are_refused(section, settings, message) -> None:
    with pytest.raises(ValueError, match=message):
        section(**settings)


def test_batch_that_ranks_cannot_divide_names_the_usable_ranks() -> None:
    run = RunConfig(train=TrainConfig(batch_size=6, microbatch_size=2))
    with pytest.raises(RunError, match=r"batch_size 6 .* 4 ranks; usable ranks: \[1, 2, 3, 6\]"):
        run.check_batch(4)
    with pytest.raises(RunError, match="microbatch_size 2 does not divide the 3 sequences"):
        run.check_batch(2)
    run.check_batch(3)


def test_the_command_line_imports_quickly_after_torch() -> None:
    program = (
        "import torch, time; begin = time.process_time(); import moe_train.cli; "
        "print(time.process_time() - begin)"
    )
    seconds = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert float(seconds) < 2  # of the processor, whatever else runs on this machine
