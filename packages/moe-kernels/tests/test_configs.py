"""The tables of sizes: each entry computes the right thing, and a wrong table does not load."""

import logging
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from moe_kernels import config as table
from moe_kernels.backend import interpreted
from moe_kernels.config import (
    ARCHITECTURES,
    Config,
    architecture_of,
    configs_of,
    read_configs,
    use_configs,
    write_configs,
)
from moe_kernels.gemm.kernel import grouped_mm_dw_triton, grouped_mm_triton
from moe_kernels.mlp.kernel import gate_up_triton
from moe_kernels.mlp.swiglu import swiglu
from moe_kernels.mxfp8 import dequantize, quantize
from moe_kernels.mxgemm.kernel import scaled_mm_triton
from moe_kernels.mxgemm.native_kernel import native_mm_triton
from moe_kernels.routing.tiles import group_rows_and_tiles, tile_rows
from moe_kernels.testing import randn
from triton.runtime.interpreter import InterpreterBuilder

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = {"half": torch.bfloat16 if DEVICE == "cuda" else torch.float16, "single": torch.float32}
BOUND = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}  # of a row, in norm
INTERPRETS_SCALED = hasattr(InterpreterBuilder, "create_dot_scaled")  # not in Triton 3.6
D, F, COUNTS = 80, 96, [0, 130, 3, 70]


def entries(scaled: bool = False) -> list[tuple[str, str, Config]]:
    """Every operation, dtype and sizes that any table holds, each once.

    Of MXFP8: the architecture whose kernel it is, recipe and sizes.
    """
    found = {}
    for architecture in ARCHITECTURES:
        if DEVICE == "cuda" and architecture_of(torch.cuda.get_device_capability()) != architecture:
            continue
        for name, config in configs_of(architecture).items():
            operation, dtype, _ = name.split(".")
            if (operation == "scaled") == scaled:
                found[architecture if scaled else operation, dtype, config] = None
    return list(found)


def assert_rows_near(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.double().cpu() - want).norm(dim=-1)
    scale = want.norm(dim=-1)
    assert scale.median() > 0.3  # of unit scale: an error has somewhere to show
    assert bool((error <= BOUND[got.dtype] * scale.clamp(min=1e-30)).all())


@pytest.mark.parametrize(("operation", "dtype", "config"), entries())
def test_every_entry_computes_each_row_as_float64_does(operation, dtype, config) -> None:
    kind, E = DTYPES[dtype], len(COUNTS)
    offsets_E1 = torch.tensor([0, *COUNTS]).cumsum(0).int()
    spans = [slice(a, b) for a, b in pairwise(offsets_E1.tolist())]
    N = int(offsets_E1[-1])
    x_ND, dy_NF = randn(N, D, seed=0, dtype=kind), randn(N, F, seed=1, dtype=kind)
    w_EFD = randn(E, F, D, seed=2, dtype=kind) / D**0.5
    there = offsets_E1.to(DEVICE)
    if operation == "wgrad":
        got = grouped_mm_dw_triton(x_ND.to(DEVICE), dy_NF.to(DEVICE), there, config=config)
        want = torch.stack([dy_NF[s].double().T @ x_ND[s].double() for s in spans])
        assert_rows_near(got[1:], want[1:])
        assert (got[0] == 0).all()
    elif operation == "gate_up":
        slots = torch.randperm(N, generator=torch.Generator().manual_seed(3)).int()
        w_EGD = randn(E, 2 * F, D, seed=4, dtype=kind) / D**0.5
        tiles = tile_rows(there, N, config.block_n)
        args = (x_ND.to(DEVICE), w_EGD.to(DEVICE), there, tiles, config)
        for rows, extra in ((x_ND, ()), (x_ND[slots // 3], (slots.to(DEVICE), 3))):
            h_NG, act_NF = gate_up_triton(*args, *extra)
            want = torch.cat([rows[s].double() @ w_EGD[e].double().T for e, s in enumerate(spans)])
            assert_rows_near(h_NG, want)
            assert_rows_near(act_NF, swiglu(want))
    else:
        w = w_EFD if operation == "forward" else w_EFD.mT.contiguous().mT
        got = grouped_mm_triton(x_ND.to(DEVICE), w.to(DEVICE), there, config=config)
        want = torch.cat([x_ND[s].double() @ w_EFD[e].double().T for e, s in enumerate(spans)])
        assert_rows_near(got, want)


@pytest.mark.parametrize(("architecture", "recipe", "config"), entries(scaled=True))
def test_every_entry_for_mxfp8_computes_each_row_as_float64_does(
    architecture, recipe, config
) -> None:
    N, D, F = sum(COUNTS), 160, 272  # more than a block of each
    offsets_E1 = torch.tensor([0, *COUNTS]).cumsum(0).int()
    spans = [slice(a, b) for a, b in pairwise(offsets_E1.tolist())]
    scale_ND = torch.exp2(randn(N, D // 32, seed=1) * 3).repeat_interleave(32, dim=1)
    x = quantize(randn(N, D, seed=0) * scale_ND, recipe=recipe)
    w = quantize(randn(len(COUNTS), F, D, seed=2), recipe=recipe)
    run = native_mm_triton if architecture == "sm_100" else scaled_mm_triton
    if DEVICE == "cpu" and run is native_mm_triton and not INTERPRETS_SCALED:
        pytest.skip("this interpreter has no block-scaled product")
    there = [type(x)(*(t.to(DEVICE) for t in mx)) for mx in (x, w)]
    got = run(*there, offsets_E1.to(DEVICE), recipe, torch.float32, config=config).cpu()
    x_ND, w_EFD = dequantize(x).double(), dequantize(w).double()
    want = torch.cat([x_ND[s] @ w_EFD[e].T for e, s in enumerate(spans)])
    # Hopper adds float8 products with about 14 bits until a scale ends that.
    bound = 2**-10 if DEVICE == "cuda" else 1e-6
    assert ((got.double() - want).norm(dim=1) <= bound * want.norm(dim=1)).all()


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    for architecture in ARCHITECTURES:
        text = write_configs(configs_of(architecture), "Where and when.\nAnd how.")
        assert read_configs(text) == configs_of(architecture)
        assert text.startswith("# Where and when.\n# And how.\n")


def test_a_file_takes_the_place_of_the_shipped_table(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(table, "_chosen", {})
    small = Config(block_n=64, block_f=64, block_d=64, num_warps=4, num_stages=2)
    path = tmp_path / "sm_90.toml"
    products = [name for name in configs_of("sm_90") if not name.startswith("scaled")]
    path.write_text(write_configs(dict.fromkeys(products, small), "All alike."))
    try:
        use_configs("sm_90", path)
        assert set(configs_of("sm_90").values()) == {small}
        assert small not in configs_of("sm_100").values()
    finally:
        configs_of.cache_clear()


def test_a_table_that_lacks_or_misnames_something_is_refused(tmp_path: Path) -> None:
    good = write_configs(configs_of("sm_90"), "x")
    for old, new, message in (
        (
            "[wgrad.half.few]",
            "[wgrad.half.fee]",
            r"missing: \['wgrad.half.few'\], .*'wgrad.half.fee'",
        ),
        ("block_f = 128", "block_f = 96", r"block_f must be a power of two, 1 or more, got 96"),
        ("num_stages = 3", "num_stages = 0", r"num_stages must be an integer, 1 or more, got 0"),
        ("num_stages = 3", "stages = 3", r"\[forward.half.few\]: .*stages"),
        ("halves = false", "halves = 1", r"halves must be true or false, got 1"),
        ("block_d = 64", "block_d = 8", r"blocks must be 16 or more, .* block_d=8"),
        ("num_warps = 4", "num_warps = 64", "num_warps must be at most 32, got 64"),
        ("[forward.half.few]", "forward.x = 3\n[y.half.few]", r"missing: \['forward.half.few'\]"),
        ("block_n = 64", "block_n = 32", r"half.few: .* must be the same, got {'forward': 32"),
        ("[scaled.mx32.few]", "[scaled.mx64.few]", r"missing: \['scaled.mx32.few'\]"),
        (
            "[scaled.mx128.few]\nblock_n = 64\nblock_f = 128\nblock_d = 128",
            "[scaled.mx128.few]\nblock_n = 64\nblock_f = 128\nblock_d = 64",
            r"\[scaled.mx128.few\]: block_d must be a multiple of the 128 values .* got 64",
        ),
    ):
        assert old in good
        path = tmp_path / "bad.toml"
        path.write_text(good.replace(old, new, 1))
        with pytest.raises(ValueError, match=message):
            use_configs("sm_90", path)
    with pytest.raises(ValueError, match=r"one of sm_80, sm_90, sm_100, sm_120, got 'sm_70'"):
        use_configs("sm_70", path)


@pytest.mark.parametrize(
    ("capability", "architecture"),
    [((8, 0), "sm_80"), ((8, 6), "sm_120"), ((8, 9), "sm_120"), ((9, 0), "sm_90"),
     ((10, 0), "sm_100"), ((10, 3), "sm_100"), ((12, 0), "sm_120"), ((12, 1), "sm_120")],
)  # fmt: skip
def test_each_known_gpu_has_a_table(capability, architecture) -> None:
    assert architecture_of(capability) == architecture


def test_an_unknown_gpu_gets_the_nearest_table_and_says_so_once(caplog) -> None:
    architecture_of.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert architecture_of((13, 0)) == architecture_of((13, 0)) == "sm_120"
    assert caplog.messages == [
        "no configurations for compute capability 13.0: those of sm_120 are used"
    ]


def test_a_gpu_without_tensor_cores_for_bfloat16_is_named() -> None:
    with pytest.raises(RuntimeError, match=r"capability 8.0 or more, got 7.5"):
        architecture_of((7, 5))


def test_few_rows_an_expert_choose_low_tiles(monkeypatch) -> None:
    sizes = {"few": 64, "many": 128}
    monkeypatch.setattr(table, "architecture_of", lambda capability: "sm_90")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    class Rows:
        is_cuda, device = True, "cuda:0"

        def element_size(self) -> int:
            return 2

    for rows, regime in ((96 * 8 - 1, "few"), (96 * 8, "many")):
        assert table.choose("forward", Rows(), rows, 8).block_n == sizes[regime]


@pytest.mark.parametrize("kernel", [False, True], ids=["torch", "kernel"])
def test_offsets_past_the_rows_list_no_more_tiles_than_the_map_holds(kernel) -> None:
    with interpreted() if kernel else nullcontext():
        tiles = tile_rows(torch.tensor([0, 100]).int(), 8, 4)
    assert int(tiles.num_tiles) == len(tiles.tile_map) == 3


def test_tiles_of_a_layer_and_of_offsets_are_the_same() -> None:
    expert_TK = torch.tensor([[1, 3], [1, 0], [-1, 1]], dtype=torch.int32)
    groups, tiles = group_rows_and_tiles(expert_TK, 4, 2)
    assert all(
        torch.equal(a, b) for a, b in zip(tiles, tile_rows(groups.offsets_E1, 6, 2), strict=True)
    )
