"""The kernels that group rows, and the map of tiles, beside plain Python."""

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_kernels.routing import group_rows, group_rows_and_tiles, tile_rows
from moe_kernels.routing.groups.kernel import Blocks, group_rows_triton, tile_rows_triton
from moe_kernels.routing.groups.reference import group_rows_reference, tile_rows_reference
from moe_kernels.testing import row_counts, seeds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The fixture ``poison`` is a function and holds no state.
STATELESS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
# One step a block and many blocks, several steps, several sums a scan, and what ships.
CUTS = [Blocks(16, 64, 16), Blocks(16, 2, 16), Blocks(32, 5, 16), Blocks()]


@st.composite
def any_ids(draw, max_tokens: int = 60):
    """Draw ids that a kernel must take: repeated in a row, masked, far out of range."""
    E = draw(st.sampled_from([1, 2, 3, 7, 8, 31, 128, 300]))
    T, K, seed = draw(st.integers(0, max_tokens)), draw(st.integers(1, 9)), draw(seeds)
    generator = torch.Generator().manual_seed(seed)
    low, high = draw(st.sampled_from([(0, E), (-1, E), (-3, E + 2), (-1, 0), (E - 1, E), (0, 1)]))
    ids_TK = torch.randint(low, high, (T, K), generator=generator)
    if draw(st.booleans()):
        return E, ids_TK.int()
    far = torch.rand(T, K, generator=generator) < 0.1
    return E, torch.where(far, ids_TK + 2**32, ids_TK)  # the lower half of such an id is in range


def tiles_of(offsets: list[int], block_n: int) -> list[tuple[int, int]]:
    """List (expert, block) in plain Python."""
    return [
        (e, block)
        for e, (a, b) in enumerate(pairwise(offsets))
        for block in range(-(-(b - a) // block_n))
    ]


def assert_tiles(tile_map, num_tiles, offsets: list[int], num_rows: int, block_n: int) -> None:
    want = tiles_of(offsets, block_n)
    assert tile_map.dtype == num_tiles.dtype == torch.int32
    assert tile_map.shape == (num_rows // block_n + len(offsets) - 1,)
    assert num_tiles.tolist() == [len(want)]
    entries = tile_map.tolist()
    assert [(entry & 4095, entry >> 12) for entry in entries[: len(want)]] == want
    assert entries[len(want) :] == [-1] * (len(entries) - len(want))


@settings(max_examples=40, suppress_health_check=STATELESS)
@given(any_ids(), st.sampled_from(CUTS), st.sampled_from([None, 1, 16, 48]))
def test_the_kernels_order_rows_as_a_stable_sort_does(poison, case, blocks, block_n) -> None:
    E, expert_TK = case
    want = group_rows_reference(expert_TK, E)
    with poison():
        got = group_rows_triton(expert_TK.to(DEVICE), E, block_n, blocks)
    for g, w in zip(got[:3], want, strict=True):
        assert g.dtype == torch.int32
        assert torch.equal(g.cpu(), w)
    if block_n is None:
        assert len(got) == 3
    else:
        assert_tiles(*got[3:], want[0].tolist(), expert_TK.numel(), block_n)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter alone has an order to turn round")
@settings(max_examples=10)
@given(any_ids(max_tokens=30))
def test_programs_can_run_in_any_order(case) -> None:
    E, expert_TK = case
    interpreter = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    set_grid_idx = interpreter.set_grid_idx

    def set_last_first(x: int, y: int, z: int) -> None:
        set_grid_idx(interpreter.grid_dim[0] - 1 - x, y, z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "set_grid_idx", set_last_first)
        got = group_rows_triton(expert_TK, E, 16, CUTS[0])
    assert all(torch.equal(g, w) for g, w in zip(got, group_rows_and_tiles_flat(case), strict=True))


def group_rows_and_tiles_flat(case) -> tuple[torch.Tensor, ...]:
    E, expert_TK = case
    groups = group_rows_reference(expert_TK, E)
    return *groups, *tile_rows_reference(groups[0], expert_TK.numel(), 16)


@settings(max_examples=30, suppress_health_check=STATELESS)
@given(row_counts(max_experts=40), st.integers(0, 40), st.sampled_from([1, 16, 17, 64]))
def test_tiles_come_by_expert_then_block_and_never_span_two(poison, counts, tail, block_n) -> None:
    offsets_E1 = torch.tensor([0, *counts]).cumsum(0).int()
    N = sum(counts) + tail
    with poison():
        kernel = tile_rows_triton(offsets_E1.to(DEVICE), N, block_n)
        public = tile_rows(offsets_E1, N, block_n)
    for got in (kernel, public):
        assert_tiles(*got, offsets_E1.tolist(), N, block_n)


@pytest.mark.parametrize("E", [1, 4095])
def test_the_least_and_the_most_experts_have_tiles(E) -> None:
    ids_TK = torch.tensor([[E - 1, 0]] * 33)
    groups, tiles = group_rows_and_tiles(ids_TK, E, 16)
    offsets = groups.offsets_E1.tolist()
    assert_tiles(*tiles, offsets, 66, 16)


@pytest.mark.parametrize("E", [1, 1025])
def test_the_kernels_take_one_expert_and_more_than_a_thousand(E) -> None:
    ids_TK = torch.tensor([[E - 1, 0]] * 33)
    groups, tiles = group_rows_and_tiles(ids_TK, E, 16)
    got = group_rows_triton(ids_TK.to(DEVICE), E, 16)
    assert all(torch.equal(g.cpu(), w) for g, w in zip(got, (*groups, *tiles), strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
def test_operators_pass_opcheck() -> None:
    ids_TK = torch.tensor([[1, 0], [1, -1], [3, 2]])
    ops = torch.ops.moe_kernels
    torch.library.opcheck(ops.group_rows.default, (ids_TK, 4))
    torch.library.opcheck(ops.group_rows_and_tiles.default, (ids_TK, 4, 2))
    torch.library.opcheck(ops.tile_rows.default, (torch.tensor([0, 3, 5]).int(), 6, 2))


def test_shapes_are_known_without_values() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        ids_TK = torch.empty(100, 3, dtype=torch.int64)
        groups, tiles = group_rows_and_tiles(ids_TK, 7, 64)
        again = group_rows(ids_TK, 7)
    assert [tuple(t.shape) for t in (*groups, *tiles)] == [(8,), (300,), (100, 3), (11,), (1,)]
    assert [t.shape for t in again] == [t.shape for t in groups]
    assert {t.dtype for t in (*groups, *tiles)} == {torch.int32}


@pytest.mark.parametrize(
    ("E", "num_rows", "block_n", "message"),
    [
        (4096, 8, 16, "a tile map holds at most 4095 experts, got 4096"),
        (2, 8, 0, "block_n must be at least 1, got 0"),
        (2, 2**23 + 1, 16, r"at most 2\*\*19 blocks.*num_rows=8388609 for block_n=16"),
        (2, -1, 16, "num_rows=-1 for block_n=16"),
    ],
)
def test_what_the_map_cannot_hold_is_refused_with_the_limit(E, num_rows, block_n, message) -> None:
    with pytest.raises(ValueError, match=message):
        tile_rows(torch.zeros(E + 1, dtype=torch.int32), num_rows, block_n)


def test_offsets_of_another_kind_are_refused() -> None:
    with pytest.raises(TypeError, match=r"offsets_E1 must be int32, got torch.int64"):
        tile_rows(torch.zeros(3, dtype=torch.int64), 4, 16)
    with pytest.raises(ValueError, match=r"offsets_E1 must have 1 axis.*got shape \(1,\)"):
        tile_rows(torch.zeros(1, dtype=torch.int32), 4, 16)
    too_many = torch.zeros(1, dtype=torch.int32).expand(2**20, 2**11)
    with pytest.raises(ValueError, match=r"fewer than 2\*\*31 ids, got 2147483648"):
        group_rows(too_many, 4)
