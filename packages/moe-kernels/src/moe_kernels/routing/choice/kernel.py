"""How the GPU chooses experts: whole rows of logits in registers, one pass over memory.

Floats are compared as integers in the same order, for which the hardware has one instruction that
reduces a warp. Up to ``MOST_ROUNDS`` experts are chosen by as many rounds, each of which takes the
best left and, of equal ones, the lowest id. More are chosen by sorting the row.

Cost: ``T*E`` logits are read, ``T*E`` scores and ``2*T*K`` weights and ids written; backward reads
logits, ``T*K`` gradients and ids, ``T*E`` gradients of scores where there are any, and writes
``T*E``.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_kernels.scratch import scratch

MOST_ROUNDS = 32


class Rows(NamedTuple):
    """How rows are spread over programs.

    Attributes:
        t: Rows of a program.
        num_warps: Warps of 32 threads. With one, no reduction over a row leaves its warp.
    """

    t: int
    num_warps: int


def choose_rows(num_experts: int, top_k: int) -> Rows:
    """Return about 16 values of a row for each thread."""
    block_e = _block_e(num_experts)
    if top_k > MOST_ROUNDS:  # the steps of a sort go through shared memory anyway
        return Rows(max(1, 512 // block_e), num_warps=4)
    return Rows(max(1, 512 // block_e), num_warps=1)


def _block_e(num_experts: int) -> int:
    return max(16, triton.next_power_of_2(num_experts))


# A key orders floats as an integer: the magnitude's bits with the float's sign. 0 and -0 are one.
INF_KEY = tl.constexpr(0x7F800000)
NEVER_KEY = tl.constexpr(-0x7F800000)  # of -inf
LOWEST = tl.constexpr(-0x80000000)  # below every key


@triton.jit
def _key_of(x):
    """Return the keys of floats; NaN as +inf, which no choice survives."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & 0x7FFFFFFF, INF_KEY)
    return tl.where((bits >= 0) | (bits & 0x7FFFFFFF > INF_KEY), magnitude, -magnitude)


@triton.jit
def _value_of(key):
    bits = tl.where(key >= 0, key, -key | LOWEST)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _sigmoid(x):
    small = tl.exp(-tl.abs(x))  # at most 1, so nothing overflows
    return tl.where(x >= 0.0, 1.0, small) / (1.0 + small)


@triton.jit
def _log_sigmoid(x):
    return tl.minimum(x, 0.0) - tl.log(1.0 + tl.exp(-tl.abs(x)))


@triton.jit
def _best(key, e, BLOCK_E: tl.constexpr):
    """Return the highest key of each row and the lowest place that has it, [BLOCK_T, 1]."""
    best = tl.max(key, 1, keep_dims=True)
    return best, tl.min(tl.where(key == best, e, BLOCK_E), 1, keep_dims=True)


@triton.jit
def _close_groups(
    key, biased, e, E, num_groups, top_groups, BLOCK_E: tl.constexpr
):  # fmt: skip
    """Return the keys, NEVER in all but the best groups; a group is worth its best two experts."""
    group = e // (E // num_groups)  # [1, BLOCK_E], at least num_groups past the last expert
    value = tl.full(key.shape, LOWEST, tl.int32)
    for g in range(num_groups):
        own = tl.where(group == g, biased, LOWEST)
        first, place = _best(own, e, BLOCK_E)
        second = tl.max(tl.where(e == place, LOWEST, own), 1, keep_dims=True)
        usable = first > NEVER_KEY
        total = tl.where(usable, _value_of(tl.where(usable, first, 0)), 0.0)
        more = second > NEVER_KEY
        total += tl.where(more, _value_of(tl.where(more, second, 0)), 0.0)
        worth = tl.where(usable, _key_of(total), NEVER_KEY)
        value = tl.where(group == g, worth, value)
    is_open = tl.zeros(key.shape, tl.int1)
    for _ in range(top_groups):
        _, place = _best(value, e, BLOCK_E)
        chosen = group == place // (E // num_groups)
        is_open = is_open | chosen
        value = tl.where(chosen, LOWEST, value)
    return tl.where(is_open | (e >= E), key, NEVER_KEY)


@triton.jit
def _take_in_rounds(key, x, e, K, LOGITS_ARE_KEYS: tl.constexpr, BLOCK_E: tl.constexpr):
    """Return ids, logits and keys of the best K experts in places 0..K-1 of each row.

    Example: keys (3, 5, 5), K = 2. Round 0 finds 5 at place 1 and closes it, round 1 finds 5 at
    place 2. The ids are (1, 2, 0), of which the first two count.
    """
    ids = tl.zeros(key.shape, tl.int32)
    logit = tl.zeros(key.shape, tl.float32)
    taken = tl.zeros(key.shape, tl.int32)
    bits = x.to(tl.int32, bitcast=True)
    for k in range(K):
        best, place = _best(key, e, BLOCK_E)
        here = e == place
        ids = tl.where(e == k, place, ids)
        taken = tl.where(e == k, best, taken)
        if not LOGITS_ARE_KEYS:  # a sum of one thing, as integers: exact
            own = tl.sum(tl.where(here, bits, 0), 1, keep_dims=True)
            logit = tl.where(e == k, own.to(tl.float32, bitcast=True), logit)
        key = tl.where(here, LOWEST, key)
    if LOGITS_ARE_KEYS:
        logit = _value_of(tl.where(e < K, taken, 0))
    return ids, logit, taken


@triton.jit
def _take_by_sorting(key, row_ptrs, stride_e, e, chosen, BLOCK_E: tl.constexpr):
    """Do the same by sorting (key, id), ids turned round so that the lower one comes first."""
    packed = (key.to(tl.int64) << 32) | (BLOCK_E - 1 - e).to(tl.int64)
    packed = tl.sort(packed, 1, descending=True)
    ids = BLOCK_E - 1 - (packed & 0xFFFFFFFF).to(tl.int32)
    wide = ids.to(tl.int64)
    logit = tl.load(row_ptrs + wide * stride_e, mask=chosen, other=0.0).to(tl.float32)
    return ids, logit, (packed >> 32).to(tl.int32)


@triton.jit
def _selection_key(
    x, score, bias_ptr, e, E, num_groups, top_groups,
    BIAS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Return the keys that the choice goes by; the logits' without a bias: they never saturate."""
    key = _key_of(x)
    if BIAS or GROUPS:
        biased = score
        if BIAS:
            biased += tl.load(bias_ptr + e, mask=e < E, other=0.0).to(tl.float32)
        biased = tl.where(key <= NEVER_KEY, NEVER_KEY, _key_of(biased))
        if BIAS:
            key = biased
        if GROUPS:
            key = _close_groups(key, biased, e, E, num_groups, top_groups, BLOCK_E)
    return tl.where(e < E, key, LOWEST)


@triton.jit
def _weights(
    logit, highest, inverse, e, K, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr
):  # fmt: skip
    """Return the weights of the chosen logits, places 0..K-1, before the scale."""
    if RENORMALIZE:
        log = _log_sigmoid(logit) if SIGMOID else logit
        log = tl.where(e < K, log, float("-inf"))
        weight = tl.exp(log - tl.max(log, 1, keep_dims=True))
        weight = weight * (1.0 / tl.sum(weight, 1, keep_dims=True))
    elif SIGMOID:
        weight = _sigmoid(logit)
    else:  # the minimum is for places past K, which hold anything
        weight = tl.exp(tl.minimum(logit - highest, 0.0)) * inverse
    return weight


@triton.jit
def _route_kernel(
    logits_ptr, bias_ptr, mask_ptr,
    weight_ptr, expert_ptr, score_ptr, num_bad_ptr,
    T, E, stride_t, stride_e, num_groups, top_groups, scale,
    K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr,
    BIAS: tl.constexpr, GROUPS: tl.constexpr, MASK: tl.constexpr, SORT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Route some rows.

    Invariant: a row that is masked, or bad, leaves -1 and zeros; only a bad one counts. Every row
    is computed from finite numbers, so nothing depends on how NaN travels.

    Example: logits (0, 2, 2), K = 2, renormalized: ids (1, 2), weights (0.5, 0.5).
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    inside = (t < T) & (e < E)
    row_ptrs = logits_ptr + t * stride_t
    wide = e.to(tl.int64)
    x = tl.load(row_ptrs + wide * stride_e, mask=inside, other=float("-inf")).to(tl.float32)
    peak = tl.max(_key_of(x), 1, keep_dims=True)
    bad = (peak == INF_KEY) | (peak <= NEVER_KEY)
    x = tl.where(bad & (e < E), 0.0, x)  # [BLOCK_T, BLOCK_E], -inf past the last expert
    highest = _value_of(tl.where(bad, 0, peak))
    if SIGMOID:
        score = _sigmoid(x)
        inverse = highest
    else:
        score = tl.exp(x - highest)
        inverse = 1.0 / tl.sum(score, 1, keep_dims=True)
        score = score * inverse

    key = _selection_key(x, score, bias_ptr, e, E, num_groups, top_groups, BIAS, GROUPS, BLOCK_E)
    chosen = (t < T) & (e < K)
    if SORT:
        ids, logit, taken = _take_by_sorting(key, row_ptrs, stride_e, e, chosen, BLOCK_E)
    else:
        ids, logit, taken = _take_in_rounds(key, x, e, K, not BIAS, BLOCK_E)
    unfit = (e < K) & ((taken <= NEVER_KEY) | (taken == INF_KEY))
    bad = bad | (tl.max(unfit.to(tl.int32), 1, keep_dims=True) > 0)
    given = t < T
    if MASK:
        given = given & (tl.load(mask_ptr + t, mask=given, other=0) != 0)
    out = bad | ~given
    num_bad = tl.sum((bad & given).to(tl.int32))
    tl.atomic_add(num_bad_ptr, num_bad, mask=num_bad > 0, sem="relaxed")  # integers: any order

    logit = tl.where(out, 0.0, logit)
    weight = _weights(logit, highest, inverse, e, K, SIGMOID, RENORMALIZE)
    at = t * K + e
    tl.store(weight_ptr + at, tl.where(out, 0.0, weight * scale), mask=chosen)
    tl.store(expert_ptr + at, tl.where(out, -1, ids), mask=chosen)
    tl.store(score_ptr + t * E + e, tl.where(out, 0.0, score), mask=inside)


@triton.jit
def _route_backward_kernel(
    dweight_ptr, dscore_ptr, logits_ptr, expert_ptr, dlogits_ptr,
    T, E, stride_t, stride_e, scale,
    K: tl.constexpr, SIGMOID: tl.constexpr, RENORMALIZE: tl.constexpr, DSCORE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute ``dlogits_TE`` of some rows, zeros where masked.

    Example: softmax over two, not renormalized, K = 1, expert 0 with score 3/4 and gradient 1 of
    its weight. The gradients of the scores are (1, 0), those of the logits
    (3/4 * (1 - 3/4), 1/4 * (0 - 3/4)).
    """
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    e = tl.arange(0, BLOCK_E)[None, :]
    inside = (t < T) & (e < E)
    wide = e.to(tl.int64)
    x_ptrs = logits_ptr + t * stride_t + wide * stride_e
    x = tl.load(x_ptrs, mask=inside, other=float("-inf")).to(tl.float32)
    listed = (t < T) & (e < K)
    at = t * K + e
    ids = tl.load(expert_ptr + at, mask=listed, other=-1)  # [BLOCK_T, BLOCK_E], K of them
    dweight = tl.load(dweight_ptr + at, mask=listed, other=0.0).to(tl.float32) * scale
    kept = tl.max(ids, 1, keep_dims=True) >= 0
    x = tl.where(kept, x, tl.where(e < E, 0.0, float("-inf")))

    # Bring each gradient from its place to its expert.
    bits = dweight.to(tl.int32, bitcast=True)
    dchosen = tl.zeros(x.shape, tl.float32)
    is_chosen = tl.zeros(x.shape, tl.int1)
    for k in range(K):
        here = e == tl.sum(tl.where(e == k, ids, 0), 1, keep_dims=True)
        own = tl.sum(tl.where(e == k, bits, 0), 1, keep_dims=True).to(tl.float32, bitcast=True)
        dchosen = tl.where(here, own, dchosen)
        is_chosen = is_chosen | here

    if SIGMOID:
        score = _sigmoid(x)
    else:
        score = tl.exp(x - tl.max(x, 1, keep_dims=True))
        score = score * (1.0 / tl.sum(score, 1, keep_dims=True))
    dscore = tl.zeros(x.shape, tl.float32)
    if DSCORE:
        dscore = tl.load(dscore_ptr + t * E + e, mask=inside, other=0.0).to(tl.float32)
    if not RENORMALIZE:
        dscore += dchosen
    if SIGMOID:
        dlogits = dscore * score * _sigmoid(-x)
    else:
        dlogits = score * (dscore - tl.sum(score * dscore, 1, keep_dims=True))
    if RENORMALIZE:
        log = _log_sigmoid(x) if SIGMOID else x
        log = tl.where(is_chosen & kept, log, tl.where(kept, float("-inf"), 0.0))
        share = tl.exp(log - tl.max(log, 1, keep_dims=True))
        share = share * (1.0 / tl.sum(share, 1, keep_dims=True))
        dlog = share * (dchosen - tl.sum(share * dchosen, 1, keep_dims=True))
        dlogits += dlog * _sigmoid(-x) if SIGMOID else dlog
    dlogits = tl.where(kept, dlogits, 0.0).to(dlogits_ptr.dtype.element_ty)
    tl.store(dlogits_ptr + t * E + e, dlogits, mask=inside)


def route_triton(
    logits_TE: Tensor,
    top_k: int,
    score: str,
    renormalize: bool,
    bias_E: Tensor | None,
    num_groups: int,
    top_groups: int,
    scale: float,
    mask_T: Tensor | None,
    rows: Rows | None = None,
    by_sorting: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernel; any strides do. The last two arguments are for tests."""
    T, E = logits_TE.shape
    t, num_warps = rows or choose_rows(E, top_k)
    launch: dict[str, int] = {"num_warps": num_warps}
    weight_TK = scratch(logits_TE, T, top_k, dtype=torch.float32)
    score_TE = scratch(logits_TE, T, E, dtype=torch.float32)
    expert_TK = scratch(logits_TE, T, top_k, dtype=torch.int32)
    num_bad = torch.zeros((), dtype=torch.int32, device=logits_TE.device)
    if T:
        _route_kernel[(triton.cdiv(T, t),)](
            logits_TE,
            logits_TE if bias_E is None else bias_E.contiguous(),
            logits_TE if mask_T is None else mask_T.contiguous(),
            weight_TK, expert_TK, score_TE, num_bad,
            T, E, logits_TE.stride(0), logits_TE.stride(1), num_groups, top_groups, float(scale),
            K=top_k, SIGMOID=score == "sigmoid", RENORMALIZE=renormalize,
            BIAS=bias_E is not None, GROUPS=num_groups > 1, MASK=mask_T is not None,
            SORT=top_k > MOST_ROUNDS if by_sorting is None else by_sorting,
            BLOCK_T=t, BLOCK_E=_block_e(E), **launch,
        )  # fmt: skip
    return weight_TK, expert_TK, score_TE, num_bad


def route_backward_triton(
    dweight_TK: Tensor,
    dscore_TE: Tensor | None,
    logits_TE: Tensor,
    expert_TK: Tensor,
    score: str,
    renormalize: bool,
    scale: float,
    rows: Rows | None = None,
) -> Tensor:
    """Launch the backward kernel; any strides do."""
    (T, E), K = logits_TE.shape, expert_TK.shape[1]
    t, num_warps = rows or choose_rows(E, 1)
    launch: dict[str, int] = {"num_warps": num_warps}
    dlogits_TE = scratch(logits_TE, T, E)
    if T:
        _route_backward_kernel[(triton.cdiv(T, t),)](
            dweight_TK.contiguous(),
            dweight_TK if dscore_TE is None else dscore_TE.contiguous(),
            logits_TE, expert_TK.contiguous(), dlogits_TE,
            T, E, logits_TE.stride(0), logits_TE.stride(1), float(scale),
            K=K, SIGMOID=score == "sigmoid", RENORMALIZE=renormalize,
            DSCORE=dscore_TE is not None,
            BLOCK_T=t, BLOCK_E=_block_e(E), **launch,
        )  # fmt: skip
    return dlogits_TE
