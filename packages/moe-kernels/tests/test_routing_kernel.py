"""The routing kernels beside the reference, in Triton's interpreter or on the GPU.

Logits of the first test come from three levels, and biases from multiples of 2. So keys, and sums
of two keys, are either equal bit by bit or far apart, and the choice must be the same for every
dtype and option, ties included.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_kernels import group_rows, route
from moe_kernels.routing.choice.kernel import Rows, route_backward_triton, route_triton
from moe_kernels.routing.choice.reference import route_backward_reference, route_reference
from moe_kernels.testing import randn, seeds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STATELESS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
INF, NAN = torch.inf, torch.nan
LEVELS, BIASES = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, -4.0])
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [None, Rows(1, 1), Rows(4, 4)]


class Problem(NamedTuple):
    """Arguments of ``route``, and how the kernel is to find the best."""

    logits_TE: torch.Tensor
    top_k: int
    score: str
    renormalize: bool
    bias_E: torch.Tensor | None
    num_groups: int
    top_groups: int
    scale: float
    mask_T: torch.Tensor | None
    rows: Rows | None
    by_sorting: bool

    def args(self) -> tuple:
        return tuple(self)[1:-2]


def pick(values: torch.Tensor, *shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return values[torch.randint(len(values), shape, generator=generator)]


def spoil(draw, logits_TE: torch.Tensor) -> None:
    """Let some rows hold what routers produce on a bad day."""
    E = logits_TE.shape[1]
    for row_E in logits_TE:
        fault = draw(st.sampled_from(["", "", "", "nan", "inf", "never", "some", "all"]))
        e = draw(st.integers(0, E - 1))
        if fault in ("nan", "inf"):
            row_E[e] = NAN if fault == "nan" else INF
        elif fault == "some":
            row_E[e:] = -INF
        elif fault:
            row_E[:] = -INF if fault == "never" else NAN


@st.composite
def problems(draw, values: torch.Tensor | None = LEVELS) -> Problem:
    num_groups = draw(st.sampled_from([1, 1, 2, 3, 8]))
    size = draw(st.sampled_from([1, 2, 3, 5, 8, 16, 24]))
    top_groups, E = draw(st.integers(1, num_groups)), num_groups * size
    most = top_groups * size
    top_k = draw(st.sampled_from([k for k in (1, 2, 3, 8, 11, 16) if k <= most] + [most]))
    T, seed = draw(st.integers(0, 6)), draw(seeds)
    if values is None:
        logits_TE = randn(T, E, seed=seed)
    else:
        logits_TE = pick(values, T, E, seed=seed)
        spoil(draw, logits_TE)
    biased, masked = draw(st.booleans()) and values is not None, draw(st.booleans())
    return Problem(
        logits_TE,
        top_k,
        draw(st.sampled_from(["softmax", "sigmoid"])),
        draw(st.booleans()),
        pick(BIASES, E, seed=seed + 1) if biased else None,
        num_groups if values is not None else 1,
        top_groups if values is not None else 1,
        draw(st.sampled_from([1.0, 2.5])),
        randn(T, seed=seed + 2) < 1 if masked else None,
        draw(st.sampled_from(ROWS)),
        draw(st.booleans()),
    )


def run(p: Problem) -> list[torch.Tensor]:
    to = [x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in p]
    return [t.cpu() for t in route_triton(*to)]


def assert_routing(got: list[torch.Tensor], want: tuple[torch.Tensor, ...]) -> None:
    for index, name in ((1, "expert_TK"), (3, "num_bad")):
        assert torch.equal(got[index], want[index]), name
        assert got[index].dtype == torch.int32
    for index in (0, 2):
        assert got[index].dtype == torch.float32
        torch.testing.assert_close(got[index], want[index], rtol=2e-6, atol=1e-7)


@settings(max_examples=60, suppress_health_check=STATELESS)
@given(problems(), st.sampled_from(DTYPES))
def test_the_choice_is_the_reference_s_bit_by_bit_and_ties_go_to_the_lowest_id(
    poison, p: Problem, dtype
) -> None:
    p = p._replace(logits_TE=p.logits_TE.to(dtype))
    with poison():
        got = run(p)
    assert_routing(got, route_reference(p.logits_TE, *p.args()))


@settings(max_examples=25)
@given(problems(values=None))
def test_the_choice_goes_by_the_last_bit_of_a_logit(p: Problem) -> None:
    assert_routing(run(p), route_reference(p.logits_TE, *p.args()))


@pytest.mark.parametrize("top_k", [1, 2, 3, 8, 11, 16, 24])
@pytest.mark.parametrize("by_sorting", [False, True])
def test_every_k_up_to_e_is_found_both_ways(top_k: int, by_sorting: bool) -> None:
    logits_TE = randn(3, 24, seed=top_k)
    p = Problem(logits_TE, top_k, "softmax", True, None, 1, 1, 1.0, None, None, by_sorting)
    assert_routing(run(p), route_reference(logits_TE, *p.args()))


@pytest.mark.parametrize(("E", "top_k"), [(1, 1), (1000, 8), (1024, 40), (1024, 1024)])
def test_rows_as_wide_as_a_program_holds_are_routed(E: int, top_k: int) -> None:
    logits_TE, options = randn(1, E, seed=top_k), ("sigmoid", True, None, 1, 1, 1.0, None)
    got = [t.cpu() for t in route_triton(logits_TE.to(DEVICE), top_k, *options)]
    assert_routing(got, route_reference(logits_TE, top_k, *options))


def test_zeros_of_both_signs_are_equal_and_nan_of_both_signs_is_bad() -> None:
    zero_TE = torch.tensor([[-0.0, 0.0, -0.0], [0.0, -NAN, 0.0], [-1.0, -0.0, 0.0]])
    weight_TK, expert_TK, _, num_bad = route_triton(
        zero_TE.to(DEVICE), 3, "softmax", False, None, 1, 1, 1.0, None
    )
    assert expert_TK.tolist() == [[0, 1, 2], [-1, -1, -1], [1, 2, 0]]
    assert num_bad.item() == 1
    assert weight_TK[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bias_that_is_not_finite_masks_what_it_decides(value: float) -> None:
    bias_E = torch.tensor([0.0, value, 0.0, 0.0])
    logits_TE = randn(4, 4, seed=0)
    args = (3, "softmax", False, bias_E, 1, 1, 1.0, None)
    got = route_triton(logits_TE.to(DEVICE), *args[:3], bias_E.to(DEVICE), *args[4:])
    assert_routing([t.cpu() for t in got], route_reference(logits_TE, *args))
    assert got[3].item() == (0 if value == -INF else 4)


def test_logits_of_any_strides_are_read_where_they_are() -> None:
    logits_TE = randn(5, 12, seed=0)
    args = (2, "softmax", True, None, 1, 1, 1.0, None)
    want = route_reference(logits_TE, *args)
    dweight_TK, dscore_TE = randn(5, 2, seed=1), randn(5, 12, seed=2)
    rest = (want[1].to(DEVICE), "softmax", True, 1.0)
    for view_TE in (logits_TE.T.contiguous().T, torch.cat([logits_TE, logits_TE], 1)[:, :12]):
        there_TE = view_TE.to(DEVICE)
        assert_routing([t.cpu() for t in route_triton(there_TE, *args)], want)
        dlogits = [
            route_backward_triton(dweight_TK.to(DEVICE), dscore_TE.T.contiguous().T.to(DEVICE), x,
                                  *rest)
            for x in (there_TE, logits_TE.to(DEVICE))
        ]  # fmt: skip
        assert torch.equal(*dlogits)


@settings(max_examples=40, suppress_health_check=STATELESS)
@given(problems(), st.sampled_from(DTYPES), st.booleans(), seeds)
def test_gradients_are_those_of_float64_whatever_memory_held(
    poison, p: Problem, dtype, with_score: bool, seed: int
) -> None:
    logits_TE = (p.logits_TE + randn(*p.logits_TE.shape, seed=seed) / 8).to(dtype)
    _, expert_TK, score_TE, _ = route_reference(logits_TE, *p.args())
    dweight_TK = randn(*expert_TK.shape, seed=seed + 1)
    dscore_TE = randn(*score_TE.shape, seed=seed + 2) if with_score else None
    out_T = expert_TK[:, 0] < 0
    dweight_TK[out_T] = NAN  # a masked row has no gradient, whatever comes in
    args = (expert_TK, p.score, p.renormalize, p.scale)
    to = (dweight_TK, dscore_TE, logits_TE, expert_TK)
    with poison():
        got_TE = route_backward_triton(
            *(None if x is None else x.to(DEVICE) for x in to), *args[1:], rows=p.rows
        ).cpu()
    wide = (None if x is None else x.double() for x in (dweight_TK, dscore_TE, logits_TE))
    want_TE = route_backward_reference(*wide, *args)
    assert got_TE.dtype == dtype
    assert (got_TE[out_T] == 0).all()
    # Triton's interpreter cuts float32 to bfloat16 instead of rounding it.
    rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[dtype]
    torch.testing.assert_close(got_TE.double(), want_TE, rtol=rtol, atol=4e-6)


@settings(max_examples=25)
@given(problems(values=None), st.booleans(), seeds)
def test_the_written_out_gradient_is_autograd_s(p: Problem, with_score: bool, seed: int) -> None:
    leaf_TE = p.logits_TE.double().requires_grad_()
    weight_TK, expert_TK, score_TE, _ = route_reference(leaf_TE, *p.args())
    dweight_TK, dscore_TE = randn(*weight_TK.shape, seed=seed), randn(*score_TE.shape, seed=seed)
    total = (weight_TK * dweight_TK).sum() + (score_TE * dscore_TE).sum() * with_score
    (want_TE,) = torch.autograd.grad(total, leaf_TE)
    got_TE = route_backward_reference(
        dweight_TK.double(), dscore_TE.double() if with_score else None,
        leaf_TE, expert_TK, p.score, p.renormalize, p.scale,
    )  # fmt: skip
    torch.testing.assert_close(got_TE, want_TE)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_gradients_and_their_gradients_are_numerical_derivatives(score, renormalize) -> None:
    logits_TE = randn(3, 6, seed=0, dtype=torch.float64).requires_grad_()
    mask_T = torch.tensor([True, False, True])

    def outputs(logits_TE: torch.Tensor):
        routing = route(
            logits_TE, 3, score=score, renormalize=renormalize, scale=2.5, mask_T=mask_T
        )
        return routing.weight_TK, routing.score_TE

    assert torch.autograd.gradcheck(outputs, (logits_TE,))
    assert torch.autograd.gradgradcheck(outputs, (logits_TE,))
    assert torch.autograd.gradgradcheck(lambda x: outputs(x)[0], (logits_TE,))
    assert torch.autograd.gradcheck(lambda x: outputs(x)[1], (logits_TE,))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck reads it off its own views
def test_operators_pass_opcheck() -> None:
    logits_TE = randn(5, 8, seed=0).requires_grad_()
    mask_T, bias_E = torch.tensor([True] * 4 + [False]), randn(8, seed=1)
    ops = torch.ops.moe_kernels
    for x_TE in (logits_TE, randn(8, 5, seed=0).T.requires_grad_(), logits_TE.detach().bfloat16()):
        for args in ((2, "softmax", True, None, 1, 1, 1.0, None),
                     (2, "sigmoid", False, bias_E, 4, 2, 2.5, mask_T)):  # fmt: skip
            torch.library.opcheck(ops.route.default, (x_TE, *args))
    dweight_TK, dscore_TE = randn(5, 2, seed=2).requires_grad_(), randn(5, 8, seed=3)
    ids_TK = route(logits_TE, 2).expert_TK
    for d_TE in (None, dscore_TE.requires_grad_()):
        args = (dweight_TK, d_TE, logits_TE, ids_TK, "softmax", True, 1.0)
        torch.library.opcheck(ops.route_backward.default, args)


def test_routing_compiles_into_one_graph_each_way() -> None:
    def layer(logits_TE: torch.Tensor, mask_T: torch.Tensor):
        routing = route(logits_TE, 2, renormalize=True, mask_T=mask_T)
        groups = group_rows(routing.expert_TK, 8)
        return routing.weight_TK.square().sum() + routing.score_TE.square().sum(), groups[1]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        logits_TE, mask_T = randn(6, 8, seed=seed).requires_grad_(), randn(6, seed=9) < 1
        (want, want_N), (got, got_N) = layer(logits_TE, mask_T), compiled(logits_TE, mask_T)
        assert torch.equal(got, want)
        assert torch.equal(got_N, want_N)
        grads = [torch.autograd.grad(loss, logits_TE)[0] for loss in (want, got)]
        assert torch.equal(*grads)
