import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import grouped_mm, grouped_mm_dw
from moe_kernels.gemm.kernel import Tile, grouped_mm_dw_triton, grouped_mm_triton
from moe_kernels.testing import GroupedProblem, grouped_problems, randn, seeds

# Without a GPU the kernel runs in Triton's interpreter, whose tl.dot multiplies the bit patterns
# of bfloat16 instead of its values (seen in 3.6 to 3.9). So bfloat16 is tested on the GPU alone.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TILES = (Tile(16, 16, 16, 4, 1), Tile(32, 16, 32, 4, 2), Tile(16, 64, 16, 4, 1))
# Error of a sum of at most 150 products of normal values, in units of the dtype's rounding.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}


def on_device(run):
    """Let the kernel have its arguments where it runs, and bring the result back."""
    return lambda *args: run(*(t.to(DEVICE) for t in args), TILES[0]).cpu()


def dense_forward(x_ND, w_EFD, offsets_E1) -> torch.Tensor:
    """Multiply every row by every expert in float64 and keep the row's own."""
    valid = int(offsets_E1[-1])
    expert_N = torch.searchsorted(offsets_E1[1:], torch.arange(valid), right=True)
    every_NEF = torch.einsum("nd,efd->nef", x_ND[:valid].double(), w_EFD.double())
    y_NF = torch.zeros(len(x_ND), w_EFD.shape[1], dtype=torch.float64)
    y_NF[:valid] = every_NEF[torch.arange(valid), expert_N]
    return y_NF


def dense_dw(x_ND, dy_NF, offsets_E1) -> torch.Tensor:
    spans = zip(offsets_E1[:-1].tolist(), offsets_E1[1:].tolist(), strict=True)
    return torch.stack([dy_NF[a:b].double().T @ x_ND[a:b].double() for a, b in spans])


def assert_near(got: torch.Tensor, want: torch.Tensor, scale: float = 1.0) -> None:
    bound = TOLERANCE[got.dtype] * scale
    torch.testing.assert_close(got.double(), want, rtol=bound, atol=bound * 10)


@given(grouped_problems(dtypes=tuple(TOLERANCE)))
def test_each_row_meets_its_own_expert_and_rows_past_the_end_are_zero(
    problem: GroupedProblem,
) -> None:
    assert_near(grouped_mm(*problem), dense_forward(*problem))


@settings(max_examples=15)
@given(
    grouped_problems(dtypes=(torch.float32, torch.float16), max_rows=60, max_width=40),
    st.sampled_from(TILES),
)
def test_kernel_agrees_with_dense_products(problem: GroupedProblem, tile: Tile) -> None:
    got = grouped_mm_triton(*(t.to(DEVICE) for t in problem), tile).cpu()
    assert_near(got, dense_forward(*problem))


@settings(max_examples=15)
@given(
    grouped_problems(dtypes=(torch.float32, torch.float16), max_rows=60, max_width=40),
    st.sampled_from(TILES),
    seeds,
)
def test_weight_gradient_kernel_agrees_with_dense_products(problem, tile, seed) -> None:
    x_ND, w_EFD, offsets_E1 = problem
    dy_NF = randn(len(x_ND), w_EFD.shape[1], seed=seed, dtype=x_ND.dtype)
    dy_NF[int(offsets_E1[-1]) :] = torch.inf
    args = (x_ND.to(DEVICE), dy_NF.to(DEVICE), offsets_E1.to(DEVICE))
    want = dense_dw(x_ND, dy_NF, offsets_E1)
    assert_near(grouped_mm_dw_triton(*args, tile).cpu(), want)
    assert_near(grouped_mm_dw(x_ND, dy_NF, offsets_E1), want)


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter alone has an order to turn round")
@given(grouped_problems(dtypes=(torch.float32,), max_rows=60, max_width=20))
@settings(max_examples=10)
def test_programs_can_run_in_any_order(problem: GroupedProblem) -> None:
    # In order, a program that writes a row of the next expert is overwritten by the right one.
    interpreter = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    set_grid_idx = interpreter.set_grid_idx

    def set_last_first(x: int, y: int, z: int) -> None:
        set_grid_idx(interpreter.grid_dim[0] - 1 - x, y, z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "set_grid_idx", set_last_first)
        got = grouped_mm_triton(*problem, TILES[0])
    assert_near(got, dense_forward(*problem))


@pytest.mark.parametrize("num_experts", [1, 2, 3])
@pytest.mark.parametrize("kernel", [False, True], ids=["op", "kernel"])
def test_any_strides_give_the_same_product(num_experts: int, kernel: bool) -> None:
    run = on_device(grouped_mm_triton) if kernel else grouped_mm
    x_ND, w_EFD = randn(9, 12, seed=0), randn(num_experts, 10, 12, seed=1)
    offsets_E1 = torch.linspace(0, 7, num_experts + 1).int()
    want = dense_forward(x_ND, w_EFD, offsets_E1)
    transposed = x_ND.T.contiguous().T, w_EFD.mT.contiguous().mT
    padded = torch.cat([x_ND, x_ND], 1)[:, :12], torch.cat([w_EFD, w_EFD], 2)[..., :12]
    for x, w in ((x_ND, w_EFD), transposed, padded):
        assert_near(run(x, w, offsets_E1), want)


@pytest.mark.parametrize("num_experts", [1, 2, 3])
def test_gradients_and_their_gradients_are_numerical_derivatives(num_experts: int) -> None:
    offsets_E1 = torch.tensor([0, 2, 2, 5][: num_experts + 1], dtype=torch.int32)
    x_ND = randn(6, 4, seed=0, dtype=torch.float64).requires_grad_()
    w_EFD = randn(num_experts, 3, 4, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(grouped_mm, (x_ND, w_EFD, offsets_E1))
    assert torch.autograd.gradgradcheck(grouped_mm, (x_ND, w_EFD, offsets_E1))


COUNTS = [0, 5, 0, 7, 0, 0, 3, 0]


@pytest.mark.parametrize("kernel", [False, True], ids=["op", "kernel"])
def test_experts_without_rows_get_zero_gradient_whatever_memory_held(poison, kernel) -> None:
    run = on_device(grouped_mm_dw_triton) if kernel else grouped_mm_dw
    offsets_E1 = torch.tensor([0, *COUNTS]).cumsum(0).int()
    x_ND, dy_NF = randn(15, 20, seed=0), randn(15, 10, seed=1)
    with poison():
        dw_EFD = run(x_ND, dy_NF, offsets_E1)
    assert dw_EFD.isfinite().all()
    for count, dw_FD in zip(COUNTS, dw_EFD, strict=True):
        assert bool((dw_FD == 0).all()) == (count == 0)


@pytest.mark.parametrize("kernel", [False, True], ids=["op", "kernel"])
@pytest.mark.parametrize("poisonous", [torch.nan, torch.inf])
def test_rows_past_the_last_offset_are_never_read(poison, kernel, poisonous) -> None:
    run = on_device(grouped_mm_triton) if kernel else grouped_mm
    x_ND, w_EFD = randn(128, 8, seed=0), randn(3, 6, 8, seed=1)
    x_ND[77:] = poisonous
    offsets_E1 = torch.tensor([0, 30, 30, 77], dtype=torch.int32)
    with poison():
        y_NF = run(x_ND, w_EFD, offsets_E1)
        dx_ND = run(torch.full((128, 6), poisonous), w_EFD.mT, torch.zeros(4, dtype=torch.int32))
    assert_near(y_NF, dense_forward(x_ND, w_EFD, offsets_E1))
    assert (y_NF[77:] == 0).all()
    assert (dx_ND == 0).all()


def test_a_nan_in_a_row_stays_in_that_row() -> None:
    x_ND, w_EFD = randn(6, 4, seed=0), randn(2, 5, 4, seed=1)
    x_ND[2, 1] = torch.nan
    for run in (grouped_mm, on_device(grouped_mm_triton)):
        y_NF = run(x_ND, w_EFD, torch.tensor([0, 3, 6]).int())
        assert y_NF.isnan().all(dim=1).tolist() == [False, False, True, False, False, False]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
def test_operators_pass_opcheck() -> None:
    offsets_E1 = torch.tensor([0, 2, 4], dtype=torch.int32)
    x_ND, w_EFD = randn(5, 4, seed=0).requires_grad_(), randn(2, 6, 4, seed=1).requires_grad_()
    dy_NF = randn(5, 6, seed=2).requires_grad_()
    torch.library.opcheck(torch.ops.moe_kernels.grouped_mm.default, (x_ND, w_EFD, offsets_E1))
    torch.library.opcheck(torch.ops.moe_kernels.grouped_mm_dw.default, (x_ND, dy_NF, offsets_E1))


@pytest.mark.parametrize(
    ("x_shape", "w_shape", "entries", "message"),
    [
        ((4,), (2, 3, 5), 3, r"x_ND with 2 axes.*got shapes \(4,\), \(2, 3, 5\), \(3,\)"),
        ((4, 3), (2, 5, 4), 3, "D differs: x_ND has 3 columns, w_EFD has 4 columns"),
        ((4, 3), (3, 5, 3), 3, "3 entries and must have one more than the 3 experts of w_EFD"),
    ],
)
def test_shape_errors_name_both_values_and_the_rule(x_shape, w_shape, entries, message) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_mm(torch.zeros(x_shape), torch.zeros(w_shape), torch.zeros(entries).int())


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ([1, 2, 3], "must start at 0, got 1"),
        ([0, 3, 2], "must not decrease, got 3 before 2"),
        ([0, 2, 5], "ends at 5, but there are 4 rows"),
    ],
)
def test_offset_errors_name_the_value_and_the_rule(offsets, message) -> None:
    with pytest.raises(ValueError, match=message):
        grouped_mm(torch.zeros(4, 3), torch.zeros(2, 5, 3), torch.tensor(offsets).int())


def test_dtype_errors_name_both_dtypes() -> None:
    offsets_E1 = torch.tensor([0, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"x_ND torch.float32, w_EFD torch.float64"):
        grouped_mm(torch.zeros(4, 3), torch.zeros(1, 5, 3).double(), offsets_E1)
    with pytest.raises(TypeError, match=r"offsets_E1 must be int32, got torch.int64"):
        grouped_mm(torch.zeros(4, 3), torch.zeros(1, 5, 3), offsets_E1.long())
