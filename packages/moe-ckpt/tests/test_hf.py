"""Every tensor of Hugging Face has its place here: by values that occur once, squares included."""

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moe_ckpt import (
    CorruptChunkError,
    CorruptFileError,
    ExtraTensorError,
    LayoutError,
    MissingTensorError,
    ShapeMismatchError,
    export_hf,
    import_hf,
    open_checkpoint,
    save,
    verify,
)
from moe_ckpt.hf import FAMILIES, entries
from moe_ckpt.hf.tensor_file import write_tensors
from moe_ckpt.testing import apart, cut
from safetensors.numpy import load_file, save_file

COMMON = {
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 12, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
}  # fmt: skip
# F == D everywhere: nothing but values tells a matrix from its transpose, or gate from up.
CONFIGS = {
    "olmoe": {"intermediate_size": 8, "num_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "intermediate_size": 8, "moe_intermediate_size": 8, "num_local_experts": 3, "head_dim": 4,
        "num_experts_per_tok": 2, "mlp_only_layers": [0],
    },
    "mixtral": {"intermediate_size": 8, "num_local_experts": 3, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "intermediate_size": 8, "moe_intermediate_size": 8, "n_routed_experts": 4,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip


def config_of(family: str, **changes) -> dict:
    return {"model_type": family, **COMMON, **CONFIGS[family], **changes}


def unique(config: dict, dtype=np.float32) -> dict[str, np.ndarray]:
    """Return the tensors of a model, no two elements of which are the same."""
    tensors, at = {}, 0
    for entry in sorted(entries(config), key=lambda entry: entry.source):
        size = math.prod(entry.shape)
        tensors[entry.source] = np.arange(at, at + size, dtype=dtype).reshape(entry.shape)
        at += size
    assert at < 2**24, "they would not all be floats"
    return tensors


def keep(folder: Path, config: dict, tensors: dict[str, np.ndarray], files: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(tensors)
    if files == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {name: f"model-{at % files + 1:05}-of-{files:05}.safetensors"
              for at, name in enumerate(names)}  # fmt: skip
    for file in set(places.values()):
        save_file({n: tensors[n] for n in names if places[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def kept(folder: Path) -> dict[str, np.ndarray]:
    found = {}
    for file in folder.glob("*.safetensors"):
        part = load_file(file)
        assert not found.keys() & part.keys()
        found.update(part)
    return found


def by_hand(family: str, layer: int, tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Stack the experts of a layer the way the package says it keeps them."""
    moe = "block_sparse_moe" if family == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else (
        "gate_proj", "up_proj", "down_proj"
    )  # fmt: skip
    prefix = f"model.layers.{layer}.{moe}"
    count = sum(f".layers.{layer}." in n and f".{down}." in n and "experts." in n
                and "shared" not in n for n in tensors)  # fmt: skip
    both = [[tensors[f"{prefix}.experts.{e}.{p}.weight"] for p in (gate, up)] for e in range(count)]
    return {
        "gate_up": np.stack([np.concatenate(pair) for pair in both]),
        "down": np.stack([tensors[f"{prefix}.experts.{e}.{down}.weight"] for e in range(count)]),
        "router": tensors[f"{prefix}.gate.weight"],
    }


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("family", CONFIGS)
def test_experts_stack_gate_first_and_nothing_is_transposed(tmp_path, family, files) -> None:
    config = config_of(family)
    tensors = unique(config)
    path = import_hf(keep(tmp_path / "hf", config, tensors, files), tmp_path / "run")
    verify(path)
    reader = open_checkpoint(path)
    for name, want in by_hand(family, 1, tensors).items():
        np.testing.assert_array_equal(reader.read(f"layers.1.moe.{name}"), want)
    q = "q_b" if family == "deepseek_v3" else "q"
    for name, source in (
        ("embedding", "model.embed_tokens"), ("head", "lm_head"), ("norm", "model.norm"),
        ("layers.0.attention_norm", "model.layers.0.input_layernorm"),
        ("layers.1.moe_norm", "model.layers.1.post_attention_layernorm"),
        ("layers.1.attention.o", "model.layers.1.self_attn.o_proj"),
        (f"layers.0.attention.{q}", f"model.layers.0.self_attn.{q}_proj"),
    ):  # fmt: skip
        np.testing.assert_array_equal(reader.read(name), tensors[f"{source}.weight"])
    assert reader.step == 0
    assert reader.state["hf_config"] == config
    if family == "deepseek_v3":
        dense = [tensors[f"model.layers.0.mlp.{p}_proj.weight"] for p in ("gate", "up")]
        np.testing.assert_array_equal(reader.read("layers.0.mlp.gate_up"), np.concatenate(dense))
        shared = [
            tensors[f"model.layers.1.mlp.shared_experts.{p}_proj.weight"] for p in ("gate", "up")
        ]
        np.testing.assert_array_equal(
            reader.read("layers.1.moe.shared_gate_up"), np.concatenate(shared)
        )
        bias = tensors["model.layers.1.mlp.gate.e_score_correction_bias"]
        np.testing.assert_array_equal(reader.read("layers.1.moe.router_bias", "buffer"), bias)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("family", CONFIGS)
def test_what_was_imported_is_exported_byte_for_byte(tmp_path, family, dtype) -> None:
    config = config_of(family)
    kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
    tensors = {
        name: array if "e_score" in name else (array % 200).astype(kinds[dtype])
        for name, array in unique(config).items()
    }
    path = import_hf(keep(tmp_path / "hf", config, tensors), tmp_path / "run")
    out = export_hf(path, tmp_path / "out", dtype=dtype, file_bytes=700)
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 3
    found = kept(out)
    assert found.keys() == tensors.keys()
    for name, want in tensors.items():
        assert (found[name].dtype, found[name].shape) == (want.dtype, want.shape), name
        assert found[name].tobytes() == want.tobytes(), name
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert {name: (out / file).is_file() for name, file in index["weight_map"].items()} == (
        dict.fromkeys(tensors, True)
    )
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    described = json.loads((out / "config.json").read_text())
    assert described["dtype"] == described["torch_dtype"] == dtype
    assert {key: described[key] for key in config} == config
    # And once more, from what was exported.
    again = import_hf(out, tmp_path / "again")
    assert [i.crcs.tolist() for i in open_checkpoint(again).manifest.arrays] == [
        i.crcs.tolist() for i in open_checkpoint(path).manifest.arrays
    ]


@st.composite
def configs(draw) -> dict:
    family = draw(st.sampled_from(sorted(FAMILIES)))
    small = st.integers(1, 5)
    changes = {key: draw(small) for key in CONFIGS[family] if isinstance(CONFIGS[family][key], int)}
    changes |= {key: draw(small) for key in ("hidden_size", "vocab_size", "num_key_value_heads")}
    changes |= {"num_hidden_layers": draw(st.integers(0, 3)), "head_dim": draw(small)}
    changes["tie_word_embeddings"] = draw(st.booleans())
    if family == "deepseek_v3":
        changes["q_lora_rank"] = draw(st.none() | small)
        changes["n_shared_experts"] = draw(st.none() | small)
    else:
        changes["attention_bias"] = draw(st.booleans())
    if family == "qwen3_moe":
        changes |= {"decoder_sparse_step": draw(st.integers(1, 3)), "mlp_only_layers": draw(
            st.lists(st.integers(0, 2)))}  # fmt: skip
    return config_of(family, **changes)


@given(configs())
def test_the_parts_of_every_tensor_tile_it_exactly_once(config) -> None:
    found = entries(config)
    assert len({entry.source for entry in found}) == len(found)
    wholes: dict[str, list] = {}
    for entry in found:
        wholes.setdefault(entry.name, []).append(entry)
    for parts in wholes.values():
        assert len({(part.whole, part.kind) for part in parts}) == 1
        count = np.zeros(math.prod(parts[0].whole), int)
        for part in parts:
            count[part.start : part.stop] += 1
        assert (count == 1).all()


def test_masters_of_float64_come_out_rounded_once(tmp_path) -> None:
    config = config_of("mixtral")
    tensors = {n: np.full(a.shape, 1 + 2.0**-8 + 2.0**-40) for n, a in unique(config).items()}
    path = import_hf(keep(tmp_path / "hf", config, tensors), tmp_path / "run")
    assert open_checkpoint(path).dtype("norm") == np.float64
    for array in kept(export_hf(path, tmp_path / "out")).values():
        assert (array.astype(np.float64) == 1 + 2.0**-7).all()


def test_eight_bit_weights_are_multiplied_by_the_scale_of_their_block(tmp_path) -> None:
    config = config_of("deepseek_v3", quantization_config={"weight_block_size": [3, 5]})
    rng, tensors = np.random.default_rng(0), unique(config)
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    small = (rng.integers(-8, 8, (8, 8)) / 4).astype(ml_dtypes.float8_e4m3fn)
    scale = rng.random((3, 2)).astype(np.float32)
    want = small.astype(np.float32) * np.repeat(np.repeat(scale, 3, 0)[:8], 5, 1)[:, :8]
    del tensors[name]
    folder = keep(tmp_path / "hf", config, tensors)
    forms = {n: (a.dtype, a.shape) for n, a in tensors.items()}
    both = {name: small, f"{name}_scale_inv": scale}
    forms |= {n: (a.dtype, a.shape) for n, a in both.items()}
    file = folder / "model.safetensors"
    write_tensors(file, forms, {**tensors, **both}.items(), {})
    path = import_hf(folder, tmp_path / "run")
    got = open_checkpoint(path).read("layers.1.moe.gate_up")
    np.testing.assert_array_equal(got[2, 8:], want)
    np.testing.assert_array_equal(got[2, :8], tensors[name.replace("up_proj", "gate_proj")])
    described = json.loads((export_hf(path, tmp_path / "out") / "config.json").read_text())
    assert "quantization_config" not in described
    del forms[f"{name}_scale_inv"], both[f"{name}_scale_inv"]
    write_tensors(file, forms, {**tensors, **both}.items(), {})
    with pytest.raises(LayoutError, match=rf"{name} is float8_e4m3fn and has no .*_scale_inv"):
        import_hf(folder, tmp_path / "other")
    assert not list((tmp_path / "other").glob("step-*"))


def test_a_tied_head_is_not_expected_and_not_written(tmp_path) -> None:
    config = config_of("qwen3_moe", tie_word_embeddings=True)
    tensors = unique(config)
    assert "lm_head.weight" not in tensors
    path = import_hf(keep(tmp_path / "hf", config, tensors), tmp_path / "run")
    assert "head" not in open_checkpoint(path).names
    assert kept(export_hf(path, tmp_path / "out", dtype="float32")).keys() == tensors.keys()


def test_moments_are_zero_and_only_there_when_asked_for(tmp_path) -> None:
    config = config_of("deepseek_v3")
    folder = keep(tmp_path / "hf", config, unique(config))
    reader = open_checkpoint(import_hf(folder, tmp_path / "run", moments=True, step=7))
    assert reader.step == 7
    for name in reader.names:
        if name.endswith("router_bias"):
            assert reader.kinds(name) == ("buffer",)
            continue
        assert reader.kinds(name) == ("exp_avg", "exp_avg_sq", "master")
        assert not reader.read(name, "exp_avg").any()
        assert reader.shape(name, "exp_avg_sq") == reader.shape(name)
    plain = open_checkpoint(import_hf(folder, tmp_path / "plain"))
    assert {kind for name in plain.names for kind in plain.kinds(name)} == {"master", "buffer"}


def attempt(tmp_path, config, tensors, error, match, **options) -> None:
    folder = keep(tmp_path / f"hf{len(list(tmp_path.iterdir()))}", config, tensors)
    with pytest.raises(error, match=match):
        import_hf(folder, tmp_path / "run", **options)
    assert not list((tmp_path / "run").glob("step-*"))


def test_what_the_configuration_does_not_say_is_refused_by_name(tmp_path) -> None:
    config = config_of("olmoe")
    tensors = unique(config)
    expert = "model.layers.1.mlp.experts.2.up_proj.weight"
    fewer = {name: array for name, array in tensors.items() if name != expert}
    attempt(tmp_path, config, fewer, LayoutError, rf"has no {expert}; did you mean")
    more = {**tensors, "model.layers.2.eh_proj.weight": np.zeros(3, np.float32)}
    attempt(
        tmp_path, config, more, LayoutError, r"holds model\.layers\.2\.eh_proj\.weight, which no"
    )
    wrong = {**tensors, expert: np.zeros((8, 7), np.float32)}
    attempt(
        tmp_path, config, wrong, LayoutError, r"up_proj\.weight has shape \(8, 7\) .*\(8, 8\) by"
    )
    attempt(
        tmp_path, {**config, "model_type": "gpt2"}, tensors, LayoutError, "one of olmoe, .*'gpt2'"
    )
    del config["num_experts"]
    attempt(tmp_path, config, tensors, LayoutError, "of a olmoe model has no 'num_local_experts'")
    folder = keep(tmp_path / "hf", config_of("olmoe"), more)
    path = import_hf(folder, tmp_path / "run", skip=["model.layers.2.*"])
    assert open_checkpoint(path).names


def test_a_folder_that_is_not_such_a_model_is_refused(tmp_path) -> None:
    config = config_of("olmoe")
    folder = keep(tmp_path / "hf", config, unique(config), files=2)

    def refused(match, error=LayoutError):
        with pytest.raises(error, match=match):
            import_hf(folder, tmp_path / "run")

    file = folder / "model-00001-of-00002.safetensors"
    data = file.read_bytes()
    for cut_at in (0, 7, 100, len(data) - 1):
        file.write_bytes(data[:cut_at])
        refused(str(file), CorruptFileError)
    for broken in (b"\xff" * 8 + data[8:], data[:8] + b"x" + data[9:], data + b"x"):
        file.write_bytes(broken)
        refused(str(file), CorruptFileError)
    file.write_bytes(data)
    index = folder / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"]
    for change, match in (
        ({"lm_head.weight": "other.safetensors"}, "names other.safetensors, which is not there"),
        ({"x": file.name}, f"says that x is in {file.name}: it is not"),
    ):
        index.write_text(json.dumps({"weight_map": {**places, **change}}))
        refused(match)
    first = next(name for name, place in places.items() if place == file.name)
    index.write_text(json.dumps({"weight_map": {n: p for n, p in places.items() if n != first}}))
    refused(f"holds {first}, not in its index")
    index.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(r"neither .* nor .* Pickled weights \(\*\.bin\) are never read")
    (folder / "config.json").write_text("{")
    refused("is not JSON")
    (folder / "config.json").unlink()
    refused(r"has no config\.json")


def test_an_export_that_would_lose_or_invent_something_is_refused(tmp_path) -> None:
    config = config_of("mixtral")
    path = import_hf(keep(tmp_path / "hf", config, unique(config)), tmp_path / "run")
    out = tmp_path / "out"

    def refused(error, match, **options):
        with pytest.raises(error, match=match):
            export_hf(path, out, **options)
        assert not out.exists()
        assert not list(tmp_path.glob(".out*"))

    tied = {**config, "tie_word_embeddings": True}
    refused(ExtraTensorError, "holds head/master, which a model of", config=tied)
    deeper = {**config, "num_hidden_layers": 3}
    refused(MissingTensorError, r"no layers\.2\.attention\.k/master", config=deeper)
    wider = {**config, "intermediate_size": 16}
    refused(ShapeMismatchError, r"down/master has shape \(3, 8, 8\) .* \(3, 8, 16\)", config=wider)
    refused(ValueError, "dtype must be one of", dtype="int8")
    refused(ValueError, "file_bytes must be at least 1", file_bytes=0)
    export_hf(path, tmp_path / "fine", config=tied, skip=["head"])
    with pytest.raises(FileExistsError, match="fine exists already"):
        export_hf(path, tmp_path / "fine")
    chunk, norm = path / "packs/00000/c.0", open_checkpoint(path).info("norm")
    data = bytearray(chunk.read_bytes())
    data[4 * norm.start + 2] ^= 1
    chunk.write_bytes(data)
    refused(CorruptChunkError, "tensor norm/master in pack 00000")
    other = save(tmp_path / "own", cut({("w", "master"): np.ones(3)}, 0, 1), step=0, state={})
    with pytest.raises(LayoutError, match=r"was not imported and knows no config\.json"):
        export_hf(other, out)


def test_what_is_imported_in_small_chunks_is_the_same(tmp_path, monkeypatch) -> None:
    config = config_of("deepseek_v3")
    folder = keep(tmp_path / "hf", config, unique(config))
    whole = open_checkpoint(import_hf(folder, tmp_path / "whole"))
    monkeypatch.setattr("moe_ckpt.grid.LOWER_BYTES", 100)
    monkeypatch.setattr("moe_ckpt.grid.UPPER_BYTES", 300)
    with apart():
        path = import_hf(folder, tmp_path / "small")
    small = open_checkpoint(path)
    assert verify(path).chunks > verify(whole.path).chunks + 10
    for name in whole.names:
        for kind in whole.kinds(name):
            np.testing.assert_array_equal(small.read(name, kind), whole.read(name, kind))
    want, got = unique(config), kept(export_hf(path, tmp_path / "out", dtype="float32"))
    for name, array in want.items():
        np.testing.assert_array_equal(got[name], array)
