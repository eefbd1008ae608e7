"""Routing on a GPU: the operators beside the reference on the CPU, launches, waiting, graphs, size.

Logits of three levels and biases that are multiples of 2 make keys equal bit by bit or far apart,
so that the choice must be the reference's; see ``test_routing_kernel.py``.
"""

import pytest
import torch
from moe_kernels import route
from moe_kernels.routing import group_rows, group_rows_and_tiles, tile_rows
from moe_kernels.routing.choice.reference import route_backward_reference, route_reference
from moe_kernels.routing.groups.reference import group_rows_reference, tile_rows_reference

pytestmark = pytest.mark.gpu

LEVELS, BIASES = torch.tensor([0.0, 1.0, 3.0]), torch.tensor([0.0, 2.0, -4.0])
OPS = torch.ops.moe_kernels
OPTIONS = {  # score, renormalize, biased, groups, top groups, scale, masked
    "softmax": ("softmax", False, False, 1, 1, 1.0, False),
    "renormalized": ("softmax", True, False, 1, 1, 1.0, True),
    "sigmoid": ("sigmoid", False, False, 1, 1, 2.5, False),
    "everything": ("sigmoid", True, True, 4, 2, 2.5, True),
    "groups": ("softmax", True, False, 4, 3, 1.0, False),
}
SIZES = [(1, 4, 1), (77, 24, 3), (500, 128, 8), (65, 1000, 33), (33, 1024, 11), (9, 64, 16)]


def pick(values: torch.Tensor, *shape: int) -> torch.Tensor:
    return values[torch.randint(len(values), shape)]


def cuda(args):
    return [x.cuda() if isinstance(x, torch.Tensor) else x for x in args]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def arguments(T: int, E: int, K: int, options: tuple, dtype: torch.dtype):
    score, renormalize, biased, num_groups, top_groups, scale, masked = options
    if top_groups * (E // num_groups) < K:
        top_groups = num_groups
    logits_TE = pick(LEVELS, T, E)
    for fault, row_E in zip((torch.nan, torch.inf, -torch.inf), logits_TE[1:], strict=False):
        row_E[E // 2] = fault
    bias_E = pick(BIASES, E) if biased else None
    mask_T = torch.rand(T) < 0.9 if masked else None
    rest = (score, renormalize, bias_E, num_groups, top_groups, scale, mask_T)
    return logits_TE.to(dtype), K, *rest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("T", "E", "K"), SIZES)
def test_routing_is_that_of_the_cpu_bit_by_bit(T, E, K, options, dtype) -> None:
    args = arguments(T, E, K, options, dtype)
    want = route_reference(*args)
    got = OPS.route(*cuda(args))
    assert torch.equal(got[1].cpu(), want[1])
    assert torch.equal(got[3].cpu(), want[3])
    for index in (0, 2):
        torch.testing.assert_close(got[index].cpu(), want[index], rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(("T", "E", "K"), SIZES)
def test_gradients_are_those_of_float64(T, E, K, options, dtype) -> None:
    args = arguments(T, E, K, options, dtype)
    args = ((args[0].float() + torch.randn(T, E) / 8).to(dtype), *args[1:])
    _, expert_TK, score_TE, _ = route_reference(*args)
    dweight_TK, dscore_TE = torch.randn(T, K), torch.randn(T, E)
    rest = (expert_TK, args[2], args[3], args[7])
    for d_TE in (None, dscore_TE):
        wide = (None if x is None else x.double() for x in (dweight_TK, d_TE, args[0]))
        want_TE = route_backward_reference(*wide, *rest)
        got_TE = OPS.route_backward(*cuda((dweight_TK, d_TE, args[0], *rest))).cpu()
        rtol = {torch.float32: 2e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(got_TE.double(), want_TE, rtol=rtol, atol=4e-6)
    assert score_TE.shape == want_TE.shape


@pytest.mark.parametrize(("N", "E"), [(0, 5), (1, 1), (1000, 7), (262144, 128), (300001, 1024)])
@pytest.mark.parametrize("skew", ["uniform", "one expert", "masked", "square"])
def test_groups_and_tiles_are_those_of_the_cpu(N: int, E: int, skew: str) -> None:
    u_N = torch.rand(N)
    ids = {
        "uniform": (u_N * E).int(),
        "one expert": torch.full((N,), E - 1).int(),
        "masked": (u_N * (E + 1)).int() - 1,
        "square": (u_N.square() * E).long(),
    }[skew].view(N, 1)
    want = group_rows_reference(ids, E)
    tiles = tile_rows_reference(want[0], N, 128)
    groups, got_tiles = group_rows_and_tiles(ids.cuda(), E, 128)
    assert all(torch.equal(g.cpu(), w) for g, w in zip(groups, want, strict=True))
    assert all(torch.equal(g.cpu(), w) for g, w in zip(got_tiles, tiles, strict=True))
    alone = tile_rows(groups.offsets_E1, N, 128)
    assert all(torch.equal(a, b) for a, b in zip(alone, got_tiles, strict=True))


def kernels_of(function) -> list[str]:
    """Return the names of the kernels that a call launches."""
    function()
    torch.cuda.synchronize()
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA, activity.CPU]) as profile:
        function()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith("Mem")
    ]


def test_routing_is_one_kernel_each_way_and_grouping_three() -> None:
    logits_TE = torch.randn(4096, 128, device="cuda", requires_grad=True)
    routing = route(logits_TE, 8)
    forward = kernels_of(lambda: route(logits_TE, 8))
    assert len([name for name in forward if "route" in name]) == 1, forward
    assert len(forward) <= 2, forward  # the other one zeroes the count of bad rows
    names = kernels_of(lambda: group_rows_and_tiles(routing.expert_TK, 128, 128))
    assert len(names) == 3, names
    assert len(kernels_of(lambda: group_rows(routing.expert_TK, 128))) == 3
    groups = group_rows(routing.expert_TK, 128)
    assert len(kernels_of(lambda: tile_rows(groups.offsets_E1, 32768, 128))) == 1
    args = (routing.weight_TK.detach(), None, logits_TE.detach(), routing.expert_TK)
    assert len(kernels_of(lambda: OPS.route_backward(*args, "softmax", True, 1.0))) == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_the_host_never_waits_for_the_device() -> None:
    logits_TE = torch.randn(64, 8, device="cuda", requires_grad=True)
    mask_T = torch.rand(64, device="cuda") < 0.9

    def step() -> None:
        routing = route(logits_TE, 2, mask_T=mask_T)
        group_rows_and_tiles(routing.expert_TK, 8, 64)
        (routing.weight_TK.sum() + routing.score_TE.square().sum()).backward()

    step()  # compiles
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_routes_new_logits_as_eager_calls_do_and_repeats_bit_by_bit() -> None:
    logits_TE = torch.randn(2048, 64, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        routing = route(logits_TE, 8, renormalize=True)
        groups, tiles = group_rows_and_tiles(routing.expert_TK, 64, 64)
        loss = routing.weight_TK.square().sum() + routing.score_TE.square().sum()
        (grad_TE,) = torch.autograd.grad(loss, logits_TE)
        return *(t.detach() for t in routing), *groups, *tiles, grad_TE

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            logits_TE.copy_(torch.randn(2048, 64))
            logits_TE[seed, seed] = torch.nan
        want = step()
        for _ in range(2):
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, want, strict=True))
        assert captured[3].item() == 1


def needs(gibibytes: int) -> None:
    if torch.cuda.get_device_properties(0).total_memory < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of device memory")


def test_as_many_slots_as_32_bits_can_number_are_grouped() -> None:
    needs(72)
    N, E = 2**31 - 1, 7
    ids_N1 = torch.arange(N, device="cuda", dtype=torch.int32).remainder_(E).view(N, 1)
    groups = group_rows(ids_N1, E)
    counts = [N // E + (e < N % E) for e in range(E)]
    assert groups.offsets_E1.tolist() == [0, *torch.tensor(counts).cumsum(0).tolist()]
    for e in (0, E - 1):
        start, end = groups.offsets_E1[e : e + 2].tolist()
        slots = groups.slot_of_row_N[start:end]
        assert slots[0] == e
        assert (slots[1:] - slots[:-1] == E).all()
    last = groups.row_of_slot_TK.view(-1)[-3:].tolist()
    want = [groups.offsets_E1[slot % E].item() + slot // E for slot in range(N - 3, N)]
    assert last == want


def test_logits_past_two_to_the_31st_element_are_found() -> None:
    needs(40)
    T, E = 2**21 + 5, 1024
    logits_TE = torch.zeros(T, E, device="cuda", dtype=torch.bfloat16)
    logits_TE[-9:] = torch.randn(9, E, device="cuda")
    got = OPS.route(logits_TE, 4, "softmax", True, None, 1, 1, 1.0, None)
    want = route_reference(logits_TE[-9:].cpu(), 4, "softmax", True, None, 1, 1, 1.0, None)
    assert torch.equal(got[1][-9:].cpu(), want[1])
    assert got[1][:-9].eq(torch.arange(4, device="cuda")).all()
    for index in (0, 2):
        torch.testing.assert_close(got[index][-9:].cpu(), want[index], rtol=4e-6, atol=1e-7)
    dweight_TK = torch.randn(T, 4, device="cuda")
    got_TE = OPS.route_backward(dweight_TK, None, logits_TE, got[1], "softmax", True, 1.0)
    args = (dweight_TK[-9:].cpu().double(), None, logits_TE[-9:].cpu().double(), want[1])
    want_TE = route_backward_reference(*args, "softmax", True, 1.0)
    torch.testing.assert_close(got_TE[-9:].cpu().double(), want_TE, rtol=2**-8, atol=4e-6)
