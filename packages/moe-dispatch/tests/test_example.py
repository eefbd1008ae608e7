"""The example in ``examples/``: a model that knows nothing of this package, on two ranks."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch.distributed as dist
from rank_pool import RankPool

PATH = Path(__file__).parent.parent / "examples" / "plain_moe.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plain_moe", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train_on_a_rank(group: dist.ProcessGroup) -> list[float]:
    return load().train(group)


def test_two_ranks_learn_what_one_rank_learns(pool: RankPool) -> None:
    alone = load().train()
    assert alone[-1] < 0.6 * alone[0]
    for losses in pool.run(train_on_a_rank, 2):
        assert losses == pytest.approx(alone, rel=1e-4)


def test_the_program_is_short() -> None:
    assert len(PATH.read_text().splitlines()) < 80
