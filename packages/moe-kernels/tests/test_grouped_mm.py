from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_kernels import grouped_mlp, grouped_mm, grouped_mm_dw
from moe_kernels.backend import interpreted
from moe_kernels.config import Config
from moe_kernels.gemm.kernel import grouped_mm_dw_triton, grouped_mm_triton
from moe_kernels.testing import GroupedProblem, grouped_problems, randn, seeds

# Without a GPU the kernel runs in Triton's interpreter, whose tl.dot multiplies the bit patterns
# of bfloat16 instead of its values (seen in 3.6 to 3.9). So bfloat16 is tested on the GPU alone.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def config(n: int, f: int, d: int, **more: int) -> Config:
    return Config(block_n=n, block_f=f, block_d=d, num_warps=4, num_stages=2, **more)


CONFIGS = (config(16, 16, 16), config(32, 64, 16, super_n=2), config(16, 32, 32, halves=True))
# Error of a sum of at most 150 products of normal values, in units of the dtype's rounding.
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2, torch.float32: 1e-5, torch.float64: 1e-12}
IMPLEMENTATIONS = pytest.mark.parametrize("kernel", [False, True], ids=["reference", "kernel"])


def on(kernel: bool, run):
    """Let a public function run its kernel, where that is, and bring the result back."""

    def call(*args: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        if not kernel:
            return run(*args, **more)
        there = {name: t.to(DEVICE) for name, t in more.items()}
        with interpreted():
            return run(*(t.to(DEVICE) for t in args), **there).cpu()

    return call


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


KERNEL_PROBLEMS = grouped_problems(
    dtypes=(torch.float32, torch.float16), max_rows=60, max_width=80, multiple=16
)


@settings(max_examples=15)
@given(KERNEL_PROBLEMS, st.sampled_from(CONFIGS), st.booleans())
def test_kernel_agrees_with_dense_products(problem, config: Config, d_major: bool) -> None:
    x_ND, w_EFD, offsets_E1 = (t.to(DEVICE) for t in problem)
    w_EFD = w_EFD if d_major else w_EFD.mT.contiguous().mT
    got = grouped_mm_triton(x_ND, w_EFD, offsets_E1, config=config).cpu()
    assert_near(got, dense_forward(*problem))


@settings(max_examples=15)
@given(KERNEL_PROBLEMS, st.sampled_from(CONFIGS), seeds)
def test_weight_gradient_kernel_agrees_with_dense_products(problem, config, seed) -> None:
    x_ND, w_EFD, offsets_E1 = problem
    dy_NF = randn(len(x_ND), w_EFD.shape[1], seed=seed, dtype=x_ND.dtype)
    dy_NF[int(offsets_E1[-1]) :] = torch.inf
    args = (x_ND.to(DEVICE), dy_NF.to(DEVICE), offsets_E1.to(DEVICE))
    want = dense_dw(x_ND, dy_NF, offsets_E1)
    assert_near(grouped_mm_dw_triton(*args, config=config).cpu(), want)
    assert_near(grouped_mm_dw(x_ND, dy_NF, offsets_E1), want)


@IMPLEMENTATIONS
@settings(max_examples=10)
@given(problem=KERNEL_PROBLEMS, seed=seeds)
def test_a_main_gradient_grows_by_the_unrounded_sum(problem, kernel: bool, seed: int) -> None:
    x_ND, w_EFD, offsets_E1 = problem
    dy_NF = randn(len(x_ND), w_EFD.shape[1], seed=seed, dtype=x_ND.dtype)
    main_EFD = randn(*w_EFD.shape, seed=seed + 1)
    want = main_EFD.double() + dense_dw(x_ND, dy_NF, offsets_E1)
    got = on(kernel, grouped_mm_dw)(x_ND, dy_NF, offsets_E1, out_EFD=main_EFD.clone())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)
    untouched = (offsets_E1.diff() == 0).nonzero()[:, 0]
    assert torch.equal(got[untouched], main_EFD[untouched])


@pytest.mark.skipif(DEVICE == "cuda", reason="the interpreter alone has an order to turn round")
@given(KERNEL_PROBLEMS)
@settings(max_examples=10)
def test_programs_can_run_in_any_order(problem: GroupedProblem) -> None:
    # In order, a program that writes a row of the next expert is overwritten by the right one.
    interpreter = pytest.importorskip("triton.runtime.interpreter").interpreter_builder
    set_grid_idx = interpreter.set_grid_idx

    def set_last_first(x: int, y: int, z: int) -> None:
        set_grid_idx(interpreter.grid_dim[0] - 1 - x, y, z)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "set_grid_idx", set_last_first)
        got = grouped_mm_triton(*problem, config=CONFIGS[0])
    assert_near(got, dense_forward(*problem))


@pytest.mark.parametrize("num_experts", [1, 2, 3])
@IMPLEMENTATIONS
def test_any_strides_give_the_same_product(num_experts: int, kernel: bool) -> None:
    run = on(kernel, grouped_mm)
    x_ND, w_EFD = randn(9, 16, seed=0), randn(num_experts, 32, 16, seed=1)
    offsets_E1 = torch.linspace(0, 7, num_experts + 1).int()
    want = dense_forward(x_ND, w_EFD, offsets_E1)
    transposed = x_ND.T.contiguous().T, w_EFD.mT.contiguous().mT
    padded = torch.cat([x_ND, x_ND], 1)[:, :16], torch.cat([w_EFD, w_EFD], 2)[..., :16]
    odd = torch.cat([x_ND, x_ND], 1)[:, 1:17], torch.cat([w_EFD, w_EFD], 2)[..., 1:17]
    for x, w in ((x_ND, w_EFD), transposed, padded):
        assert_near(run(x, w, offsets_E1), want)
    assert_near(run(*odd, offsets_E1), dense_forward(*odd, offsets_E1))
    one = x_ND[:1].expand(9, -1)  # stride 0, as a gradient of a sum has
    assert_near(run(one, w_EFD, offsets_E1), dense_forward(one, w_EFD, offsets_E1))


@IMPLEMENTATIONS
def test_offsets_may_be_a_column_of_something(kernel) -> None:
    x_ND, w_EFD, dy_NF = randn(9, 16, seed=0), randn(3, 32, 16, seed=1), randn(9, 32, seed=2)
    column = torch.tensor([[0, 9], [4, 9], [4, 9], [9, 9]], dtype=torch.int32)[:, 0]
    want = dense_forward(x_ND, w_EFD, column.clone())
    assert_near(on(kernel, grouped_mm)(x_ND, w_EFD, column), want)
    assert_near(on(kernel, grouped_mm_dw)(x_ND, dy_NF, column), dense_dw(x_ND, dy_NF, column))
    weights = w_EFD, randn(3, 16, 16, seed=3)
    got = on(kernel, grouped_mlp)(x_ND, *weights, column)
    torch.testing.assert_close(got, grouped_mlp(x_ND, *weights, column.clone()))


@IMPLEMENTATIONS
def test_a_main_gradient_never_starts_to_require_a_gradient(kernel) -> None:
    x_ND, dy_NF, main_EFD = randn(4, 16, seed=0), randn(4, 32, seed=1), torch.zeros(1, 32, 16)
    offsets_E1 = torch.tensor([0, 4], dtype=torch.int32)
    with interpreted() if kernel else nullcontext():
        for _ in range(2):
            grouped_mm_dw(x_ND.requires_grad_(), dy_NF, offsets_E1, out_EFD=main_EFD)
    assert not main_EFD.requires_grad


@pytest.mark.parametrize("num_experts", [1, 2, 3])
def test_gradients_and_their_gradients_are_numerical_derivatives(num_experts: int) -> None:
    offsets_E1 = torch.tensor([0, 2, 2, 5][: num_experts + 1], dtype=torch.int32)
    x_ND = randn(6, 4, seed=0, dtype=torch.float64).requires_grad_()
    w_EFD = randn(num_experts, 3, 4, seed=1, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(grouped_mm, (x_ND, w_EFD, offsets_E1))
    assert torch.autograd.gradgradcheck(grouped_mm, (x_ND, w_EFD, offsets_E1))


COUNTS = [0, 5, 0, 7, 0, 0, 3, 0]


@IMPLEMENTATIONS
def test_experts_without_rows_get_zero_gradient_whatever_memory_held(poison, kernel) -> None:
    run = on(kernel, grouped_mm_dw)
    offsets_E1 = torch.tensor([0, *COUNTS]).cumsum(0).int()
    x_ND, dy_NF = randn(15, 32, seed=0), randn(15, 16, seed=1)
    with poison():
        dw_EFD = run(x_ND, dy_NF, offsets_E1)
    assert dw_EFD.isfinite().all()
    for count, dw_FD in zip(COUNTS, dw_EFD, strict=True):
        assert bool((dw_FD == 0).all()) == (count == 0)


@IMPLEMENTATIONS
@pytest.mark.parametrize("poisonous", [torch.nan, torch.inf])
def test_rows_past_the_last_offset_are_never_read(poison, kernel, poisonous) -> None:
    run = on(kernel, grouped_mm)
    x_ND, w_EFD = randn(128, 16, seed=0), randn(3, 32, 16, seed=1)
    x_ND[77:] = poisonous
    offsets_E1 = torch.tensor([0, 30, 30, 77], dtype=torch.int32)
    with poison():
        y_NF = run(x_ND, w_EFD, offsets_E1)
        dx_ND = run(torch.full((128, 32), poisonous), w_EFD.mT, torch.zeros(4, dtype=torch.int32))
    assert_near(y_NF, dense_forward(x_ND, w_EFD, offsets_E1))
    assert (y_NF[77:] == 0).all()
    assert (dx_ND == 0).all()


@IMPLEMENTATIONS
def test_a_nan_in_a_row_stays_in_that_row(kernel) -> None:
    x_ND, w_EFD = randn(6, 16, seed=0), randn(2, 16, 16, seed=1)
    x_ND[2, 1] = torch.nan
    y_NF = on(kernel, grouped_mm)(x_ND, w_EFD, torch.tensor([0, 3, 6]).int())
    assert y_NF.isnan().all(dim=1).tolist() == [False, False, True, False, False, False]


@IMPLEMENTATIONS
def test_an_expert_whose_weight_is_nan_leaves_the_others_alone(kernel) -> None:
    # 24 is no multiple of a block: the last one must not read on into the next expert's weight.
    x_ND, w_EFD = randn(6, 48, seed=0), randn(2, 48, 48, seed=1)
    w_EFD[1] = torch.nan
    for w in (w_EFD, w_EFD.mT):
        y_NF = on(kernel, grouped_mm)(x_ND, w, torch.tensor([0, 3, 6]).int())
        assert y_NF.isnan().all(dim=1).tolist() == [False] * 3 + [True] * 3


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
@IMPLEMENTATIONS
def test_operators_pass_opcheck(kernel) -> None:
    ops = torch.ops.moe_kernels
    offsets_E1 = torch.tensor([0, 2, 4], dtype=torch.int32)
    x_ND, w_EFD = randn(5, 16, seed=0).requires_grad_(), randn(2, 32, 16, seed=1).requires_grad_()
    dy_NF, main_EFD = randn(5, 32, seed=2).requires_grad_(), torch.zeros(2, 32, 16)
    checks = [
        (ops.grouped_mm, (x_ND, w_EFD, offsets_E1)),
        (ops.grouped_mm_dw, (x_ND, dy_NF, offsets_E1)),
        (ops.grouped_mm_dw_add, (x_ND.detach(), dy_NF.detach(), offsets_E1, main_EFD)),
    ]
    for operator, args in checks:
        if kernel:
            with interpreted():
                torch.library.opcheck(operator.default, args)
        else:
            torch.library.opcheck(operator.default, args)


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


def test_sizes_that_no_kernel_takes_are_named() -> None:
    offsets_E1 = torch.tensor([0, 4], dtype=torch.int32)
    with interpreted(), pytest.raises(ValueError, match="take multiples of 16, got D=24, F=32"):
        grouped_mm(torch.zeros(4, 24), torch.zeros(1, 32, 24), offsets_E1)
    with interpreted(), pytest.raises(ValueError, match="take multiples of 16, got D=16, F=8"):
        grouped_mm_dw(torch.zeros(4, 16), torch.zeros(4, 8), offsets_E1)


def test_errors_of_a_main_gradient_name_both_values_and_the_rule() -> None:
    x_ND, dy_NF, offsets_E1 = torch.zeros(4, 3), torch.zeros(4, 2), torch.tensor([0, 4]).int()

    def add(out_EFD: torch.Tensor) -> None:
        grouped_mm_dw(x_ND, dy_NF, offsets_E1, out_EFD=out_EFD)

    with pytest.raises(ValueError, match=r"have shape \(1, 2, 3\), got \(1, 3, 2\), contiguous"):
        add(torch.zeros(1, 3, 2))
    with pytest.raises(ValueError, match=r"must be contiguous .* with strides \(6, 1, 2\)"):
        add(torch.zeros(1, 3, 2).mT)
    with pytest.raises(TypeError, match=r"out_EFD must be torch.float32 .* got torch.float16"):
        add(torch.zeros(1, 2, 3).half())
    with pytest.raises(ValueError, match="must not require a gradient"):
        add(torch.zeros(1, 2, 3).requires_grad_())
