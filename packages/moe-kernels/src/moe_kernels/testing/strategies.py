"""Draw the structure, seed the values.

Hypothesis is good at small structures such as shapes, counts and skews, and it shrinks them
well. It is slow at large arrays and learns nothing from them. So these strategies draw the
structure and one seed, and the values of the tensors come from a generator with that seed.
"""

from itertools import accumulate
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

seeds = st.integers(0, 2**16 - 1)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal values, the same for the same seed on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@st.composite
def row_counts(draw: st.DrawFn, max_experts: int = 8, max_rows: int = 150) -> list[int]:
    """Draw how many rows each expert gets. Empty experts and one-expert skews are common."""
    some = st.one_of(st.just(0), st.integers(0, min(5, max_rows)), st.integers(0, max_rows))
    return draw(st.lists(some, min_size=1, max_size=max_experts))


class GroupedProblem(NamedTuple):
    """Arguments of a grouped matrix product.

    Attributes:
        x_ND: Rows; those past the last offset hold NaN.
        w_EFD: One weight for each expert.
        offsets_E1: int32.
    """

    x_ND: Tensor
    w_EFD: Tensor
    offsets_E1: Tensor


@st.composite
def grouped_problems(
    draw: st.DrawFn,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16),
    max_rows: int = 150,
    max_width: int = 80,
    multiple: int = 1,
) -> GroupedProblem:
    """Draw a grouped matrix product: ragged edges, empty experts, rows past the last offset.

    D and F are multiples of ``multiple``; the kernels ask for 16.
    """
    counts = draw(row_counts(max_rows=max_rows))
    tail = draw(st.sampled_from([0, 1, 37]))
    widths = st.integers(1, max_width // multiple).map(lambda n: n * multiple)
    D, F = draw(widths), draw(widths)
    dtype, seed = draw(st.sampled_from(dtypes)), draw(seeds)
    x_ND = randn(sum(counts) + tail, D, seed=seed, dtype=dtype)
    x_ND[sum(counts) :] = torch.nan
    return GroupedProblem(
        x_ND,
        randn(len(counts), F, D, seed=seed + 1, dtype=dtype),
        torch.tensor([0, *accumulate(counts)], dtype=torch.int32),
    )


@st.composite
def routings(
    draw: st.DrawFn, num_experts: int, max_tokens: int = 20, masked: bool = True
) -> Tensor:
    """Draw ``expert_TK``: int32 ids, none twice in a row, some masked with -1.

    Skewed routings, in which only some experts can be chosen, are common.
    """
    usable = draw(st.integers(1, num_experts))
    top_k = draw(st.integers(1, usable))
    num_tokens, seed = draw(st.integers(0, max_tokens)), draw(seeds)
    noise = torch.rand(num_tokens, usable, generator=torch.Generator().manual_seed(seed))
    expert_TK = noise.argsort(dim=1)[:, :top_k].to(torch.int32)
    if masked and draw(st.booleans()):
        expert_TK[randn(num_tokens, top_k, seed=seed + 1) > 1] = -1
    return expert_TK
