"""The scaled grouped product: the reference multiplies exactly, and each kernel agrees with it."""

from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import MXTensor, dequantize, quantize, scaled_grouped_mm
from moe_kernels.backend import interpreted
from moe_kernels.config import Config, choose_scaled
from moe_kernels.mxgemm.kernel import scaled_mm_triton
from moe_kernels.mxgemm.native_kernel import native_mm_triton
from moe_kernels.mxgemm.swizzle_kernel import (
    swizzle_reference,
    swizzle_rows,
    swizzle_weights,
    unswizzle,
)
from moe_kernels.routing.tiles import tile_rows
from moe_kernels.testing import randn, row_counts, seeds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RECIPES = ("mx32", "mx128", "mxrow")
DEPTH = {"mx32": 32, "mx128": 128, "mxrow": 64}
ODD = [1, 31, 32, 33, 0, 63]
NATIVE = Config(block_n=128, block_f=128, block_d=128, num_warps=4, num_stages=2)
# Hopper adds float8 products with about 14 bits; elsewhere and in the interpreter sums are float32.
BOUND = 2**-10 if DEVICE == "cuda" else 1e-6
native_runs = pytest.mark.skipif(
    DEVICE == "cpu"
    and not hasattr(
        pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder, "create_dot_scaled"
    ),
    reason="this interpreter has no block-scaled product",
)


# Torch cannot compare float8 tensors, which the check of the schema would do.
NO_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def plain(recipe: str, n: int = 32, f: int = 32, **more: bool) -> Config:
    d = DEPTH[recipe]
    return Config(block_n=n, block_f=f, block_d=d, num_warps=4, num_stages=2, **more)


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def problem(counts: list[int], D: int, F: int, recipe: str, seed: int, tail: int = 3):
    """Rows and weights whose scales differ much between blocks; rows past the last hold NaN."""
    N, E = sum(counts) + tail, len(counts)
    spread = torch.exp2((randn(N, D // 32, seed=seed) * 4).round()).repeat_interleave(32, dim=1)
    x_ND = randn(N, D, seed=seed + 1) * spread
    x_ND[sum(counts) :] = torch.nan
    w_EFD = randn(E, F, D, seed=seed + 2) * torch.exp2(randn(E, F, 1, seed=seed + 3) * 4)
    return quantize(x_ND, recipe=recipe), quantize(w_EFD, recipe=recipe), offsets_of(counts)


def exact(x: MXTensor, w: MXTensor, offsets_E1: torch.Tensor) -> torch.Tensor:
    """Dequantise and multiply in float64, every row by every expert, and keep the row's own."""
    valid = int(offsets_E1[-1])
    expert_N = torch.searchsorted(offsets_E1[1:], torch.arange(valid), right=True)
    x_ND, w_EFD = dequantize(x)[:valid].double(), dequantize(w).double()
    y_NF = torch.zeros(len(x.data_ND), w_EFD.shape[1], dtype=torch.float64)
    y_NF[:valid] = torch.einsum("nd,nfd->nf", x_ND, w_EFD[expert_N])
    return y_NF


def there(*values):
    moved = (MXTensor(*there(*v)) if isinstance(v, MXTensor) else v.to(DEVICE) for v in values)
    return tuple(moved)


def assert_near(got: torch.Tensor, want: torch.Tensor, bound: float = BOUND) -> None:
    error = (got.cpu().double() - want).norm(dim=1)
    assert (error <= bound * want.norm(dim=1)).all(), (error, want.norm(dim=1))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_odd_counts_need_no_padding_and_rows_past_the_end_are_zero(recipe, kernel) -> None:
    x, w, offsets_E1 = problem(ODD, 160, 48, recipe, seed=0)
    with interpreted() if kernel else nullcontext():
        args = there(x, w, offsets_E1) if kernel else (x, w, offsets_E1)
        got = scaled_grouped_mm(*args, recipe=recipe, out_dtype=torch.float32)
    assert_near(got, exact(x, w, offsets_E1), BOUND if kernel else 1e-6)
    assert (got[sum(ODD) :] == 0).all()


@settings(max_examples=8)
@given(row_counts(max_experts=5, max_rows=70), st.sampled_from(RECIPES), st.booleans(), seeds)
def test_promoting_kernel_is_exact_up_to_its_sums(counts, recipe, halves, seed) -> None:
    x, w, offsets_E1 = problem(counts, 32 * (1 + seed % 6), 16 * (1 + seed % 5), recipe, seed)
    config = plain(recipe, 16 if seed % 2 else 32, halves=halves)
    got = scaled_mm_triton(*there(x, w, offsets_E1), recipe, torch.float32, config=config)
    assert_near(got, exact(x, w, offsets_E1))


@native_runs
@settings(max_examples=5)
@given(row_counts(max_experts=4, max_rows=140), st.sampled_from(RECIPES), seeds)
def test_block_scaled_kernel_is_exact_up_to_its_sums(counts, recipe, seed) -> None:
    if DEVICE == "cuda" and torch.cuda.get_device_capability()[0] != 10:
        pytest.skip("needs block-scaled tensor cores")
    x, w, offsets_E1 = problem(counts, 32 * (1 + seed % 6), 16 * (1 + seed % 12), recipe, seed)
    got = native_mm_triton(*there(x, w, offsets_E1), recipe, torch.float32, config=NATIVE)
    assert_near(got, exact(x, w, offsets_E1))


@pytest.mark.parametrize("recipe", RECIPES)
def test_gathered_tokens_multiply_as_rows_do(recipe) -> None:
    counts, K = [5, 0, 33, 10], 3
    tokens, w, offsets_E1 = problem([16, 0, 0, 0], 160, 48, recipe, seed=4, tail=0)
    slots = torch.randperm(48, generator=torch.Generator().manual_seed(0)).int()
    offsets_E1 = offsets_of(counts)
    rows = MXTensor(*(t.view(torch.uint8)[slots // K].view(t.dtype) for t in tokens))
    got = scaled_mm_triton(
        *there(tokens, w, offsets_E1), recipe, torch.float32, config=plain(recipe),
        slot_of_row_N=slots.to(DEVICE), top_k=K,
    )  # fmt: skip
    assert_near(got, exact(rows, w, offsets_E1))


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_scales_at_the_ends_of_their_range_are_exact(kernel) -> None:
    # 2**-127 is a subnormal of float32; 255 is NaN and stays in its row.
    data = torch.ones(5, 32).to(torch.float8_e4m3fn)
    codes = torch.tensor([[0], [1], [254], [255], [127]], dtype=torch.uint8)
    w = MXTensor(torch.ones(1, 16, 32).to(torch.float8_e4m3fn), torch.full((1, 16, 1), 121).byte())
    with interpreted() if kernel else nullcontext():
        got = scaled_grouped_mm(
            *there(MXTensor(data, codes), w, offsets_of([5])), out_dtype=torch.float32
        ).cpu()
    assert torch.equal(got[[0, 1, 4], 0], torch.exp2(torch.tensor([-128.0, -127.0, -1.0])))
    assert got[2, 0] == 2.0**126
    assert got[3].isnan().all()
    assert not got[[0, 1, 2, 4]].isnan().any()


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_a_zero_block_amid_data_adds_nothing(kernel) -> None:
    x_ND = randn(4, 96, seed=0)
    x_ND[:, 32:64] = 0
    x, w = quantize(x_ND), quantize(randn(1, 16, 96, seed=1))
    changed = MXTensor(w.data_ND.clone(), w.scale_NB)
    changed.data_ND[..., 32:64] = 448.0
    with interpreted() if kernel else nullcontext():
        first, second = (
            scaled_grouped_mm(*there(x, v, offsets_of([4])), out_dtype=torch.float32).cpu()
            for v in (w, changed)
        )
    assert first.isfinite().all()
    assert torch.equal(first, second)


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_the_sum_is_rounded_once_to_each_dtype(kernel) -> None:
    x, w = quantize(randn(47, 96, seed=0)), quantize(randn(2, 32, 96, seed=1))
    offsets_E1 = offsets_of([7, 40])
    with interpreted() if kernel else nullcontext():
        wide, half = (
            scaled_grouped_mm(*there(x, w, offsets_E1), out_dtype=dtype).cpu()
            for dtype in (torch.float32, torch.float16)
        )
    assert torch.equal(half, wide.to(torch.float16))
    assert half.isfinite().all()


@given(st.integers(1, 300), st.integers(1, 9), seeds)
@settings(max_examples=20)
def test_unswizzling_is_the_inverse_of_swizzling(rows, blocks, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    scale_NB = torch.randint(0, 256, (rows, blocks), generator=generator).to(torch.uint8)
    swizzled = swizzle_reference(scale_NB)
    assert swizzled.shape == (-(-rows // 128), -(-blocks // 4), 512)
    assert torch.equal(unswizzle(swizzled, rows, blocks), scale_NB)
    # A worked place: row r, block b of a square is byte (r % 32) * 16 + (r // 32) * 4 + b.
    r, b = (rows - 1) % 128, (blocks - 1) % 4
    place = (r % 32) * 16 + (r // 32) * 4 + b
    assert swizzled[-1, -1, place] == scale_NB[-1, -1]


def test_swizzle_kernels_write_the_squares_of_each_expert_alone() -> None:
    counts, B = [130, 0, 5, 128], 5
    N = sum(counts)
    scale_NB = (torch.arange(N * B) % 251).to(torch.uint8).view(N, B)
    offsets_E1 = offsets_of(counts)
    tiles = tile_rows(offsets_E1.to(DEVICE), N, 128)
    got = swizzle_rows(scale_NB.to(DEVICE), offsets_E1.to(DEVICE), tiles).cpu()
    groups = [scale_NB[a:b] for a, b in pairwise(offsets_E1.tolist())]
    want = torch.cat([swizzle_reference(group) for group in groups])
    assert torch.equal(got[: int(tiles.num_tiles)], want)
    scale_EFB = scale_NB[:260].view(2, 130, B)
    want = torch.cat([swizzle_reference(group) for group in scale_EFB])
    assert torch.equal(swizzle_weights(scale_EFB.to(DEVICE)).cpu(), want)


def test_a_broken_promise_is_named_where_the_scales_can_be_read() -> None:
    x, w, offsets_E1 = problem([4], 256, 16, "mx32", seed=3, tail=0)
    x.scale_NB[1] = torch.tensor([127, 127, 127, 120, 127, 127, 127, 127])
    x.scale_NB[0] = 127
    message = r"x is no 'mx128' tensor: blocks 0 and 3 of row \(1,\) have the scales 127 and 120"
    with pytest.raises(ValueError, match=message):
        scaled_grouped_mm(x, w, offsets_E1, recipe="mx128")
    scaled_grouped_mm(x, w, offsets_E1, recipe="mx32")


def test_arguments_that_do_not_fit_are_named() -> None:
    x, w, offsets_E1 = problem([4], 64, 16, "mx32", seed=0, tail=0)
    short = quantize(randn(4, 32, seed=0))
    with pytest.raises(ValueError, match="D differs: x has 32 columns, w has 64 columns"):
        scaled_grouped_mm(short, w, offsets_E1)
    with pytest.raises(ValueError, match="recipe must be one of mx32, mx128, mxrow, got 'mx64'"):
        scaled_grouped_mm(x, w, offsets_E1, recipe="mx64")
    with pytest.raises(TypeError, match=r"out_dtype must be .* got torch.float64"):
        scaled_grouped_mm(x, w, offsets_E1, out_dtype=torch.float64)
    with pytest.raises(ValueError, match="offsets_E1 has 2 entries"):
        scaled_grouped_mm(x, quantize(randn(2, 16, 64, seed=0)), offsets_E1)
    with interpreted(), pytest.raises(ValueError, match=r"multiples of 16, got F=8"):
        scaled_grouped_mm(x, quantize(randn(1, 8, 64, seed=0)), offsets_E1)
    config = Config(block_n=64, block_f=128, block_d=128, num_warps=4, num_stages=2)
    with pytest.raises(ValueError, match=r"block_n must be 128 .* got 64, 128, 128"):
        native_mm_triton(*there(x, w, offsets_E1), "mx32", torch.float32, config=config)
    config = replace(config, block_d=64)
    with pytest.raises(ValueError, match=r"'mx128' .* block_d must be 128, got 64"):
        scaled_mm_triton(*there(x, w, offsets_E1), "mx128", torch.float32, config=config)


def test_a_gpu_without_float8_is_named(monkeypatch) -> None:
    class Rows:
        is_cuda, device = True, "cuda:0"

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    with pytest.raises(RuntimeError, match=r"'mx128' needs float8 .* an A100 has 8.0"):
        choose_scaled("mx128", Rows(), 100, 4)


@pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])
def test_the_operator_is_a_good_citizen(kernel) -> None:
    x, w, offsets_E1 = there(*problem([3, 0, 9], 64, 32, "mx32", seed=0))
    with interpreted() if kernel else nullcontext():
        torch.library.opcheck(
            torch.ops.moe_kernels.scaled_grouped_mm.default,
            (*x, *w, offsets_E1, "mx32", torch.float32),
            test_utils=NO_SCHEMA,
        )
