"""How rows travel on the GPU.

An address in another rank's memory is its base, as mapped here, plus an offset that is the same
everywhere. Built from an integer, it loses what the compiler knew about alignment, and rows would
be stored two bytes at a time; ``multiple_of`` says it again. ``row_bytes`` is a multiple of 16.

Sums run in the order of k with separate products: launch with ``enable_fp_fusion=False``.

Bytes moved for N routes of T tokens: ``put_rows`` reads T rows and stores N; ``pull_rows`` loads
N rows and stores T; ``take_rows`` and ``give_rows`` read and store N.
"""

import triton
import triton.language as tl


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """Round to nearest, ties to even, NaN kept: the interpreter cuts bfloat16 off instead.

    Example: 1 + 2**-8 lies between 1 and 1 + 2**-7 and becomes 1, whose last bit is 0.
    """
    if dtype == tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        bits += 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, bits, 0x7FC00000)  # noqa: PLR0124 - NaN is unlike itself
        out = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        out = x.to(dtype)
    return out


@triton.jit(do_not_specialize=["origin"])
def put_rows_kernel(
    bases_ptr, state_ptr, x_ptr, weight_ptr, to_ptr, place_ptr, rank_ptr, row_ptr,
    direct_ptr, direct_weight_ptr, clock,
    rows_at, rows_size, weight_at, weight_size, row_at, row_size, origin_at, origin_size, origin,
    N: tl.constexpr, ROW_BYTES: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr, META: tl.constexpr, DEDUP: tl.constexpr, PUSHED: tl.constexpr,
    DIRECT: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Program (t, b) stores block b of token t wherever it goes: read once, stored up to K times.

    Invariant: no two programs of any rank store to the same place in one epoch.

    Example: K = 3, ``to`` = (1, -1, 0), ``place`` = (5, 0, 2): the row goes to place 5 of rank 1
    and to place 2 of rank 0. With DEDUP and ``rank`` = (1, 1, 0), ``row`` = (8, 3, 2), place 5 of
    rank 1 is told the rows (8, 3, -1) for which it stands, and its weights.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    element: tl.constexpr = x_ptr.dtype.element_ty
    parity = tl.load(state_ptr + clock) & 1
    row = tl.load(x_ptr + t * N + n, mask=n < N, other=0)  # [BLOCK]
    for k in tl.static_range(K):
        d = tl.load(to_ptr + t * K + k)
        place = tl.load(place_ptr + t * K + k).to(tl.int64)
        width = tl.where(d >= 0, N, 0)
        if DIRECT:
            target = direct_ptr + place * N
        else:
            base = tl.load(bases_ptr + tl.maximum(d, 0))
            width = tl.where(base != 0, width, 0)
            at = base + rows_at + parity * rows_size + place * ROW_BYTES
            target = tl.multiple_of(at.to(tl.pointer_type(element)), 16)
        tl.store(target + n, row, mask=n < width, cache_modifier=CACHE)
    if META:  # noqa: SIM102 - decided by the compiler
        if tl.program_id(1) == 0:
            wide: tl.constexpr = weight_ptr.dtype.element_ty
            j = tl.arange(0, BLOCK_K)
            for k in tl.static_range(K):
                d = tl.load(to_ptr + t * K + k)
                place = tl.load(place_ptr + t * K + k).to(tl.int64)
                base = tl.load(bases_ptr + tl.maximum(d, 0))
                if (d >= 0) & (base != 0):
                    if DEDUP:
                        ranks = tl.load(rank_ptr + t * K + j, mask=j < K, other=-1)
                        rows = tl.load(row_ptr + t * K + j, mask=j < K, other=-1)
                        weights = tl.load(weight_ptr + t * K + j, mask=j < K, other=0)
                        meta = (base + row_at + parity * row_size).to(tl.pointer_type(tl.int32))
                        told = tl.where(ranks == d, rows, -1)
                        tl.store(meta + place * K + j, told, mask=j < K)
                        meta = (base + weight_at + parity * weight_size).to(tl.pointer_type(wide))
                        tl.store(meta + place * K + j, weights, mask=j < K)
                    elif DIRECT:
                        tl.store(direct_weight_ptr + place, tl.load(weight_ptr + t * K + k))
                    else:
                        meta = (base + weight_at + parity * weight_size).to(tl.pointer_type(wide))
                        tl.store(meta + place, tl.load(weight_ptr + t * K + k))
                    if PUSHED:
                        meta = (base + origin_at + parity * origin_size).to(
                            tl.pointer_type(tl.int32)
                        )
                        slot = (t * K + k).to(tl.int32)
                        tl.store(meta + place, origin + slot)


@triton.jit
def take_rows_kernel(
    rows_ptr, weight_ptr, state_ptr, count_ptr, y_ptr, out_ptr, out_weight_ptr, dweight_ptr,
    rows_size, weight_size, clock,
    N: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    META: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Program r copies row r out of the receive buffer; rows that nobody sent become zeros.

    With SCALED the row is a gradient: it is multiplied by the weight of its route, and its
    product with the result y, summed over D, is the gradient of that weight.

    Example: 3 rows came into a buffer for 8. Programs 0..2 copy, 3..7 store zeros.
    """
    r = tl.program_id(0).to(tl.int64)
    count = tl.load(count_ptr)
    parity = (tl.load(state_ptr + clock) & 1).to(tl.int64)
    source = rows_ptr + parity * rows_size + r * ROW_STRIDE
    dot = tl.zeros([BLOCK], ACC)
    weight = tl.full([], 1, ACC)
    if SCALED:
        weight = tl.load(weight_ptr + r, mask=r < count, other=0).to(ACC)
    width = tl.where(r < count, N, 0)
    for start in tl.static_range(0, N, BLOCK):
        n = start + tl.arange(0, BLOCK)
        row = tl.load(source + n, mask=n < width, other=0)  # [BLOCK]
        if SCALED:
            y = tl.load(y_ptr + r * N + n, mask=n < width, other=0)
            dot += row.to(ACC) * y.to(ACC)
            row = narrow(row.to(ACC) * weight, row.dtype)
        tl.store(out_ptr + r * N + n, row, mask=n < N)
    if SCALED:
        tl.store(dweight_ptr + r, tl.sum(dot, axis=0).to(dweight_ptr.dtype.element_ty))
    if META:
        came = tl.load(weight_ptr + parity * weight_size + r, mask=r < count, other=0)
        tl.store(out_weight_ptr + r, came)


@triton.jit
def scatter_gradients_kernel(
    dy_ptr, y_ptr, weight_ptr, place_ptr, out_ptr, dweight_ptr,
    N: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Program t does for token t what ``put`` and ``take_rows`` do, where there is one rank.

    Example: place 5, weight 0.5, gradient 4, result 3: row 5 gets 2, and its weight 4 * 3 = 12.
    """
    t = tl.program_id(0).to(tl.int64)
    for k in tl.static_range(K):
        place = tl.load(place_ptr + t * K + k).to(tl.int64)
        if place >= 0:
            weight = tl.load(weight_ptr + place).to(ACC)
            dot = tl.zeros([BLOCK], ACC)
            for start in tl.static_range(0, N, BLOCK):
                n = start + tl.arange(0, BLOCK)
                row = tl.load(dy_ptr + t * N + n, mask=n < N, other=0)
                y = tl.load(y_ptr + place * N + n, mask=n < N, other=0)
                dot += row.to(ACC) * y.to(ACC)
                scaled = narrow(row.to(ACC) * weight, row.dtype)
                tl.store(out_ptr + place * N + n, scaled, mask=n < N)
            total = tl.sum(dot, axis=0).to(dweight_ptr.dtype.element_ty)
            tl.store(dweight_ptr + place, total)


@triton.jit
def clear_tail_kernel(
    rows_ptr, state_ptr, count_ptr, rows_size, clock,
    N: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program r makes row r of the receive buffer zeros if nobody sent one."""
    r = tl.program_id(0).to(tl.int64)
    parity = (tl.load(state_ptr + clock) & 1).to(tl.int64)
    if r >= tl.load(count_ptr):
        for start in tl.static_range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], rows_ptr.dtype.element_ty)
            tl.store(rows_ptr + parity * rows_size + r * ROW_STRIDE + n, zeros, mask=n < N)


@triton.jit
def give_rows_kernel(
    y_ptr, scalar_ptr, state_ptr, count_ptr, results_ptr, scalars_ptr,
    results_size, scalars_size, clock,
    N: tl.constexpr, ROW_STRIDE: tl.constexpr, BLOCK: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    """Program r lays result r out for its owner; results of rows that nobody sent stay away."""
    r = tl.program_id(0).to(tl.int64)
    parity = (tl.load(state_ptr + clock) & 1).to(tl.int64)
    if r < tl.load(count_ptr):
        for start in tl.static_range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            row = tl.load(y_ptr + r * N + n, mask=n < N)
            tl.store(results_ptr + parity * results_size + r * ROW_STRIDE + n, row, mask=n < N)
        if SCALARS:
            tl.store(scalars_ptr + parity * scalars_size + r, tl.load(scalar_ptr + r))


@triton.jit
def push_rows_kernel(
    bases_ptr, state_ptr, y_ptr, scalar_ptr, origin_ptr, row_ptr, count_ptr,
    results_at, results_size, scalars_at, scalars_size, slots_of_rank, clock,
    N: tl.constexpr, ROW_BYTES: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    SCALARS: tl.constexpr, DEDUP: tl.constexpr,
):  # fmt: skip
    """Program r stores result r into the memory of its owner, at the slot that it came from.

    Example: origin 37 with 24 slots a rank is slot 13 of rank 1. With DEDUP a result stands for
    several routes of one token; their scalars go to their own slots.
    """
    r = tl.program_id(0).to(tl.int64)
    parity = (tl.load(state_ptr + clock) & 1).to(tl.int64)
    element: tl.constexpr = y_ptr.dtype.element_ty
    if r < tl.load(count_ptr):
        origin = tl.load(origin_ptr + r).to(tl.int64)
        d = origin // slots_of_rank
        slot = origin % slots_of_rank
        base = tl.load(bases_ptr + d)
        if base != 0:
            at = base + results_at + parity * results_size + slot * ROW_BYTES
            target = tl.multiple_of(at.to(tl.pointer_type(element)), 16)
            for start in tl.static_range(0, N, BLOCK):
                n = start + tl.arange(0, BLOCK)
                tl.store(target + n, tl.load(y_ptr + r * N + n, mask=n < N), mask=n < N)
            if SCALARS:
                wide: tl.constexpr = scalar_ptr.dtype.element_ty
                scalars = (base + scalars_at + parity * scalars_size).to(tl.pointer_type(wide))
                if DEDUP:
                    token = slot // K * K
                    for k in tl.static_range(K):
                        stands = tl.load(row_ptr + r * K + k) >= 0
                        value = tl.load(scalar_ptr + r * K + k, mask=stands, other=0)
                        tl.store(scalars + token + k, value, mask=stands)
                else:
                    tl.store(scalars + slot, tl.load(scalar_ptr + r))


@triton.jit(do_not_specialize=["me"])
def pull_rows_kernel(  # noqa: PLR0912 - branches of the compiler
    bases_ptr, state_ptr, weight_ptr, to_ptr, place_ptr, rank_ptr, out_ptr, out_scalar_ptr,
    direct_ptr, direct_scalar_ptr,
    results_at, results_size, scalars_at, scalars_size, staged_at, staged_scalars_at, clock, me,
    N: tl.constexpr, ROW_BYTES: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr, SCALARS: tl.constexpr, DEDUP: tl.constexpr, PUSHED: tl.constexpr,
    STAGED: tl.constexpr, DIRECT: tl.constexpr, ACC: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program (t, b) sums block b of the results of token t in the order of k.

    Results are fetched from the rank that made them, or lie in this rank's memory, by slot, if
    they were PUSHED or come from a rank that is not mapped (STAGED). All K loads are independent,
    so that they are in flight together.

    Example: K = 2, weights (0.5, 2), results (4, 3): out is 0.5 * 4 + 2 * 3 = 8. A route that
    went nowhere adds nothing, whatever its weight.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    element: tl.constexpr = out_ptr.dtype.element_ty
    parity = tl.load(state_ptr + clock) & 1
    total = tl.zeros([BLOCK], ACC)
    for k in tl.static_range(K):
        d = tl.load(to_ptr + t * K + k)
        if DIRECT:
            source = direct_ptr + tl.load(place_ptr + t * K + k).to(tl.int64) * N
        else:
            if PUSHED:
                base = tl.load(bases_ptr + me)
                place = t * K + k
            else:
                base = tl.load(bases_ptr + tl.maximum(d, 0))
                place = tl.load(place_ptr + t * K + k).to(tl.int64)
            at = base + results_at + parity * results_size + place * ROW_BYTES
            if STAGED:  # a rank that is not mapped: its result has been fetched to its slot
                here = tl.load(bases_ptr + me) + staged_at + (t * K + k) * ROW_BYTES
                at = tl.where(base == 0, here, at)
            source = tl.multiple_of(at.to(tl.pointer_type(element)), 16)
        row = tl.load(source + n, mask=n < tl.where(d >= 0, N, 0), other=0).to(ACC)
        if WEIGHTED:
            weight = tl.load(weight_ptr + t * K + k).to(ACC)
            row *= tl.where(d >= 0, weight, 0)
        total += row
    tl.store(out_ptr + t * N + n, narrow(total, element), mask=n < N)
    if SCALARS:  # noqa: SIM102 - decided by the compiler
        if tl.program_id(1) == 0:
            for k in tl.static_range(K):
                d = tl.load(rank_ptr + t * K + k)
                goes = d >= 0
                place = tl.load(place_ptr + t * K + k).to(tl.int64)
                if DIRECT:
                    scalar_ptr = direct_scalar_ptr + place
                else:
                    if PUSHED:
                        base = tl.load(bases_ptr + me)
                        place = t * K + k
                    else:
                        base = tl.load(bases_ptr + tl.maximum(d, 0))
                        if DEDUP:
                            place = place * K + k
                    at = base + scalars_at + parity * scalars_size
                    if STAGED:
                        at = tl.where(base == 0, tl.load(bases_ptr + me) + staged_scalars_at, at)
                        place = tl.where(base == 0, t * K + k, place)
                    scalar_ptr = at.to(tl.pointer_type(WIDE)) + place
                value = tl.load(scalar_ptr, mask=goes, other=0)
                tl.store(out_scalar_ptr + t * K + k, value.to(out_scalar_ptr.dtype.element_ty))


@triton.jit
def expand_rows_kernel(
    rows_ptr, row_of_ptr, weight_ptr, state_ptr, places_ptr, count_ptr, y_ptr, out_ptr,
    out_weight_ptr, dweight_ptr, rows_size, clock, C,
    N: tl.constexpr, ROW_STRIDE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    META: tl.constexpr, SCALED: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Program p copies the row at place p to every expert of this rank that it is for.

    Invariant: each of the experts' rows has one place, so no two programs store to it. With
    SCALED as in ``take_rows_kernel``. Rows past the last become zeros.

    Example: place 5 stands for the rows (8, 3, -1): it is stored as row 8 and as row 3.
    """
    p = tl.program_id(0).to(tl.int64)
    parity = (tl.load(state_ptr + clock) & 1).to(tl.int64)
    count = tl.load(count_ptr)
    if p < tl.load(places_ptr):
        for k in tl.static_range(K):
            r = tl.load(row_of_ptr + p * K + k).to(tl.int64)
            if (r >= 0) & (r < C):
                weight = tl.load(weight_ptr + p * K + k)
                dot = tl.zeros([BLOCK], ACC)
                for start in tl.static_range(0, N, BLOCK):
                    n = start + tl.arange(0, BLOCK)
                    row = tl.load(
                        rows_ptr + parity * rows_size + p * ROW_STRIDE + n, mask=n < N, other=0
                    )
                    if SCALED:
                        y = tl.load(y_ptr + r * N + n, mask=n < N, other=0)
                        dot += row.to(ACC) * y.to(ACC)
                        row = narrow(row.to(ACC) * weight.to(ACC), row.dtype)
                    tl.store(out_ptr + r * N + n, row, mask=n < N)
                if SCALED:
                    total = tl.sum(dot, axis=0)
                    tl.store(dweight_ptr + r, total.to(dweight_ptr.dtype.element_ty))
                if META:
                    tl.store(out_weight_ptr + r, weight)
    if (p >= count) & (p < C):
        for start in tl.static_range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            zeros = tl.zeros([BLOCK], out_ptr.dtype.element_ty)
            tl.store(out_ptr + p * N + n, zeros, mask=n < N)
        if SCALED:
            tl.store(dweight_ptr + p, tl.full([], 0, dweight_ptr.dtype.element_ty))
        if META:
            tl.store(out_weight_ptr + p, tl.full([], 0, out_weight_ptr.dtype.element_ty))


@triton.jit
def reduce_rows_kernel(
    y_ptr, scalar_ptr, row_of_ptr, weight_ptr, state_ptr, places_ptr, out_ptr, scalars_ptr,
    out_size, scalars_size, clock, C,
    N: tl.constexpr, OUT_STRIDE: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr, SCALARS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Program p sums the results of this rank's experts for one token, in the order of k.

    Example: place 5 stands for the rows (8, 3, -1): out is w0 * y[8] + w1 * y[3].
    """
    p = tl.program_id(0).to(tl.int64)
    parity = (tl.load(state_ptr + clock) & 1).to(tl.int64)
    if p < tl.load(places_ptr):
        for start in tl.static_range(0, N, BLOCK):
            n = start + tl.arange(0, BLOCK)
            total = tl.zeros([BLOCK], ACC)
            for k in tl.static_range(K):
                r = tl.load(row_of_ptr + p * K + k).to(tl.int64)
                goes = (r >= 0) & (r < C)
                row = tl.load(y_ptr + r * N + n, mask=n < tl.where(goes, N, 0), other=0).to(ACC)
                if WEIGHTED:
                    weight = tl.load(weight_ptr + p * K + k).to(ACC)
                    row *= tl.where(goes, weight, 0)
                total += row
            total = narrow(total, out_ptr.dtype.element_ty)
            tl.store(out_ptr + parity * out_size + p * OUT_STRIDE + n, total, mask=n < N)
        if SCALARS:
            for k in tl.static_range(K):
                r = tl.load(row_of_ptr + p * K + k).to(tl.int64)
                goes = (r >= 0) & (r < C)
                value = tl.load(scalar_ptr + r, mask=goes, other=0)
                tl.store(scalars_ptr + parity * scalars_size + p * K + k, value)
