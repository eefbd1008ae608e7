import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moe_kernels import group_rows
from moe_kernels.testing import routings


@given(st.integers(1, 9).flatmap(lambda E: st.tuples(st.just(E), routings(E))))
def test_rows_are_sorted_by_expert_then_token_then_place(case) -> None:
    num_experts, expert_TK = case
    flat = expert_TK.flatten().tolist()
    order = sorted((slot for slot, e in enumerate(flat) if e >= 0), key=lambda slot: flat[slot])
    groups = group_rows(expert_TK, num_experts)
    assert {t.dtype for t in groups} == {torch.int32}
    below = [sum(0 <= e < expert for e in flat) for expert in range(num_experts + 1)]
    assert groups.offsets_E1.tolist() == below
    assert groups.slot_of_row_N.tolist() == order + [-1] * (len(flat) - len(order))
    want_rows = [order.index(slot) if e >= 0 else -1 for slot, e in enumerate(flat)]
    assert groups.row_of_slot_TK.shape == expert_TK.shape
    assert groups.row_of_slot_TK.flatten().tolist() == want_rows


def test_ids_out_of_range_are_refused_with_the_range() -> None:
    with pytest.raises(ValueError, match=r"must hold -1 \(masked\) or 0..2, got -2..0"):
        group_rows(torch.tensor([[0], [-2]]), 3)
    with pytest.raises(ValueError, match=r"must hold -1 \(masked\) or 0..2, got 0..3"):
        group_rows(torch.tensor([[0], [3]]), 3)
    with pytest.raises(TypeError, match=r"expert_TK must be int32 or int64, got torch.float32"):
        group_rows(torch.zeros(2, 1), 3)
