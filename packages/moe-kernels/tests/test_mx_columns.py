"""Blocks that run down the rows, of whole matrices, experts and groups."""

from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from moe_kernels import MXTensor, dequantize, quantize, quantize_both, quantize_columns
from moe_kernels.mxfp8 import CHUNK, column_offsets
from moe_kernels.testing import randn, row_counts, seeds
from torch.nn import functional as F

recipes = st.sampled_from(["mx32", "mx128", "mxrow"])
rules = st.sampled_from(["rceil", "floor"])
N10 = [1, 31, 32, 33, 0, 63]


def offsets_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *counts]).cumsum(0).int()


def same(got: MXTensor, want: MXTensor) -> bool:
    """Tell whether all bytes are the same; NaN has one."""
    return torch.equal(
        got.data_ND.view(torch.uint8), want.data_ND.view(torch.uint8)
    ) and torch.equal(got.scale_NB, want.scale_NB)


def uneven(*shape: int, seed: int) -> torch.Tensor:
    """Return values whose blocks need different scales."""
    return randn(*shape, seed=seed) * torch.exp2(4 * randn(*shape[:-1], 1, seed=seed + 1))


@given(row_counts(max_rows=300, max_experts=6), st.sampled_from([0, 1, 37]), recipes, rules, seeds)
@example(N10, 5, "mx32", "rceil", 0)
@example(N10, 0, "mxrow", "floor", 1)
def test_columns_of_a_group_are_those_of_the_group_alone_padded_by_zeros(
    counts, tail, recipe, rule, seed
) -> None:
    x_ND, offsets_E1 = uneven(sum(counts) + tail, 3, seed=seed), offsets_of(counts)
    x_ND[sum(counts) :] = torch.nan
    got = quantize_columns(x_ND, recipe=recipe, rounding=rule, offsets_E1=offsets_E1)
    starts = column_offsets(offsets_E1).tolist()
    assert starts[-1] <= got.data_ND.shape[1] == CHUNK * (len(x_ND) // CHUNK + len(counts))
    for count, row, (start, end) in zip(
        counts, offsets_E1.tolist(), pairwise(starts), strict=False
    ):
        assert end - start == -count % CHUNK + count
        padded_DN = F.pad(x_ND[row : row + count].T, (0, -count % CHUNK))
        blocks = slice(start // 32, end // 32)
        part = MXTensor(got.data_ND[:, start:end], got.scale_NB[:, blocks])
        assert same(part, quantize(padded_DN, recipe=recipe, rounding=rule))
    assert (got.data_ND[:, starts[-1] :].view(torch.uint8) == 0).all()
    assert (got.scale_NB[:, starts[-1] // 32 :] == 127).all()


@given(st.sampled_from([(64, 5), (3, 96, 32), (2, 2, 160, 7)]), recipes, rules, seeds)
def test_columns_without_groups_are_the_rows_of_the_transpose(shape, recipe, rule, seed) -> None:
    x_ND = uneven(*shape, seed=seed)
    got = quantize_columns(x_ND, recipe=recipe, rounding=rule)
    assert got.data_ND.is_contiguous()
    assert same(got, quantize(x_ND.mT.contiguous(), recipe=recipe, rounding=rule))


@given(row_counts(max_rows=200, max_experts=4), st.sampled_from([0, 37]), recipes, seeds)
@example(N10, 3, "mx128", 0)
def test_both_are_the_rows_and_the_columns(counts, tail, recipe, seed) -> None:
    x_ND, offsets_E1 = uneven(sum(counts) + tail, 64, seed=seed), offsets_of(counts)
    x_ND[sum(counts) :] = torch.nan
    rows, columns = quantize_both(x_ND, recipe=recipe, offsets_E1=offsets_E1)
    assert same(columns, quantize_columns(x_ND, recipe=recipe, offsets_E1=offsets_E1))
    assert same(rows, quantize(F.pad(x_ND[: sum(counts)], (0, 0, 0, tail)), recipe=recipe))


def test_columns_multiply_as_each_group_does_on_its_own() -> None:
    x_ND, dy_NF = uneven(sum(N10) + 2, 48, seed=0), uneven(sum(N10) + 2, 16, seed=2)
    offsets_E1 = offsets_of(N10)
    both = [quantize_columns(t, offsets_E1=offsets_E1) for t in (x_ND, dy_NF)]
    x_DP, dy_FP = (dequantize(t).double() for t in both)
    starts = column_offsets(offsets_E1).tolist()
    for (start, end), (row, stop) in zip(
        pairwise(starts), pairwise(offsets_E1.tolist()), strict=True
    ):
        got_FD = dy_FP[:, start:end] @ x_DP[:, start:end].T
        want_FD = dy_NF[row:stop].double().T @ x_ND[row:stop].double()
        terms_FD = dy_NF[row:stop].double().abs().T @ x_ND[row:stop].double().abs()
        # Each factor is off by a sixteenth; what is small beside its block adds a little.
        bound = 0.13 * terms_FD + 1e-3 * terms_FD.amax() if stop > row else terms_FD
        assert ((got_FD - want_FD).abs() <= bound).all()


def test_errors_name_both_values_and_the_rule() -> None:
    x_ND = torch.zeros(33, 64)
    with pytest.raises(ValueError, match=r"multiple of 32 where there are no .* \(33, 64\)"):
        quantize_columns(x_ND)
    with pytest.raises(ValueError, match=r"x_ND has 2 axes; got shape \(1, 33, 64\)"):
        quantize_columns(x_ND[None], offsets_E1=offsets_of([33]))
    with pytest.raises(TypeError, match=r"int32, got torch\.int64"):
        quantize_columns(x_ND, offsets_E1=torch.tensor([0, 33]))
    with pytest.raises(ValueError, match="ends at 34, but there are 33 rows"):
        quantize_columns(x_ND, offsets_E1=offsets_of([34]))
    with pytest.raises(ValueError, match="must not decrease, got 9 before 3"):
        quantize_both(x_ND, offsets_E1=torch.tensor([0, 9, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match=r"recipe must be 'mx32', 'mx128' or 'mxrow', got 'mx64'"):
        quantize_both(x_ND, recipe="mx64")
    with pytest.raises(ValueError, match=r"rows and columns, got shape \(32,\)"):
        quantize_columns(torch.zeros(32))
