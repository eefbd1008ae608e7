"""A run small enough to be made in a test."""

from pathlib import Path

import pytest
import torch
from moe_parallel import Mesh, plan_mesh
from moe_train.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from moe_train.data.training import open_data
from moe_train.trainer import Trainer

TINY = ModelConfig(
    dim=16, num_layers=2, num_heads=2, num_kv_heads=1, num_experts=4, expert_dim=8, shared_dim=8
)


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    """A folder of eight small files of regular text."""
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(8):
        lines = [f"def f{j}(x):\n    return x * {j % 7} + {i}\n" for j in range(40)]
        (folder / f"file{i}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture
def tokenizer_file(text_folder: Path, tmp_path: Path) -> Path:
    """A tokenizer of 300 tokens, trained on that text; </s> is 0."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in sorted(text_folder.iterdir())], trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def tiny_config(text_folder: Path, tmp_path: Path) -> RunConfig:
    """A run of a few thousand float64 parameters."""
    return RunConfig(
        run_dir=tmp_path / "run",
        model=TINY,
        data=DataConfig(path=text_folder, sequence_length=16),
        train=TrainConfig(
            steps=6, batch_size=8, dtype="float64", threads=1, device="cpu",
            eval_sequences=8, sample_bytes=4, save_every=3, eval_every=0, log_every=1,
        ),
    )  # fmt: skip


def make_trainer(config: RunConfig) -> Trainer:
    """Make the trainer of a run on one rank."""
    data = open_data(config.data, config.model.vocab_size, config.run_dir)
    return Trainer(
        config,
        Mesh.create(plan_mesh(1)),
        torch.device("cpu"),
        data.train,
        data.validation,
    )


@pytest.fixture
def trainer_of():
    """Return the function that makes a trainer."""
    return make_trainer


@pytest.fixture
def alone(monkeypatch) -> None:
    """Make this process one that no launcher started, whatever started the tests."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
