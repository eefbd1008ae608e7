"""Models go to Hugging Face and come back bit for bit, and compute the same there."""

import json
from pathlib import Path

import pytest
import torch
from moe_parallel import Mesh, plan_mesh
from moe_train.cli import command
from moe_train.trained import TrainedModel, find_checkpoint
from safetensors.torch import load_file

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("alone")]

COMMON = {
    "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 256, "max_position_embeddings": 64, "initializer_range": 0.2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
# Square experts, F == D: only values tell a matrix from its transpose, or gate from up.
CONFIGS = {
    "olmoe": {"intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 48, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16,
        "num_experts_per_tok": 2, "mlp_only_layers": [0], "norm_topk_prob": True,
        "tie_word_embeddings": True,
    },
    "mixtral": {
        "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "deepseek_v3": {
        "intermediate_size": 48, "moe_intermediate_size": 32, "n_routed_experts": 8,
        "n_shared_experts": 2, "num_experts_per_tok": 3, "first_k_dense_replace": 1, "n_group": 4,
        "topk_group": 2, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
    },
}  # fmt: skip


@pytest.fixture
def alone(monkeypatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def tiny(family: str) -> torch.nn.Module:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **{**COMMON, **CONFIGS[family]})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "norm" in name:
                tensor.copy_(torch.rand_like(tensor) + 0.5)
            if "bias" in name:
                tensor.copy_(torch.rand_like(tensor) * 0.3)
    return model.eval()


def logits_of(model: torch.nn.Module, ids_BS: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids_BS).logits


def ours(folder: Path, ids_BS: torch.Tensor) -> torch.Tensor:
    found = find_checkpoint(folder)
    mesh = Mesh.create(plan_mesh(1))
    holder = TrainedModel(found, found.config(), mesh, torch.device("cpu"))
    with torch.no_grad():
        return holder.model(ids_BS, holder.bias_LE)[0]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def flags(folder: Path) -> list[str]:
    text = folder.parent / "text"
    text.mkdir(exist_ok=True)
    for name in "abc":
        (text / f"{name}.py").write_text("def f(x):\n    return x + 1\n" * 60)
    return [
        "--run-dir", str(folder), "--data.path", str(text), "--data.sequence-length", "16",
        "--train.batch-size", "4", "--train.eval-sequences", "4", "--train.steps", "2",
        "--train.sample-bytes", "0", "--train.device", "cpu", "--train.save-every", "0",
    ]  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_a_model_comes_goes_and_computes_the_same(tmp_path, family) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path / "hf")
    run, out = tmp_path / "run", tmp_path / "out"
    assert command(["import", str(tmp_path / "hf"), *flags(run)]) == 0
    ids_BS = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(1))
    want = logits_of(model, ids_BS)
    assert want.std() > 0.3
    torch.testing.assert_close(ours(run, ids_BS), want, rtol=2e-4, atol=2e-4)

    assert command(["export", str(run), str(out), "--dtype", "float32"]) == 0
    before, after = tensors(tmp_path / "hf"), tensors(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert torch.equal(logits_of(again, ids_BS), want)

    # It is a run like any other: it goes on, and what it has learned computes the same there.
    assert command(["run", "--config", str(run / "config.toml")]) == 0
    assert command(["export", str(run), str(tmp_path / "later"), "--dtype", "float32"]) == 0
    later = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "later", dtype=torch.float32
    ).eval()
    got = ours(run, ids_BS)
    assert (got - want).abs().max() > 1e-3
    torch.testing.assert_close(logits_of(later, ids_BS), got, rtol=2e-4, atol=2e-4)
    described = json.loads((tmp_path / "later" / "config.json").read_text())
    assert described["model_type"] == family
