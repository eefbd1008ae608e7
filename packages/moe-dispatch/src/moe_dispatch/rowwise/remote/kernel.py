"""How rows reach ranks whose memory is not mapped here: NVSHMEM's calls in Triton kernels.

The calls are functions of NVSHMEM's bitcode library, linked into the kernel. Every thread of a
program makes them, so data moves by the forms for a whole block, and a signal is *set*, which does
no harm done often; to *add* would count threads. Addresses are this rank's own: NVSHMEM knows the
same place in the memory of a PE. The compiler does not know that a call reads memory, so barriers
stand between stores and calls.

Only the rows of unmapped ranks take this way. They leave from, and come into, symmetric memory,
since a network card has to know it.
"""

import triton
import triton.language as tl
from triton.language import core

from moe_dispatch.rowwise.agree.kernel import FAILED, PUTS, last_word

I32, I64 = core.dtype("int32"), core.dtype("int64")
SET = tl.constexpr(9)


@core.extern
def put_nbi(target, source, num_bytes, pe, _semantic=None):
    return core.extern_elementwise(
        "", "", [target, source, num_bytes, pe],
        {(I64, I64, I64, I32): ("nvshmemx_putmem_nbi_block", I32)},
        is_pure=False, _semantic=_semantic,
    )  # fmt: skip


@core.extern
def get_nbi(target, source, num_bytes, pe, _semantic=None):
    return core.extern_elementwise(
        "", "", [target, source, num_bytes, pe],
        {(I64, I64, I64, I32): ("nvshmemx_getmem_nbi_block", I32)},
        is_pure=False, _semantic=_semantic,
    )  # fmt: skip


@core.extern
def put_signal(target, source, num_bytes, signal, value, op, pe, _semantic=None):
    return core.extern_elementwise(
        "", "", [target, source, num_bytes, signal, value, op, pe],
        {(I64, I64, I64, I64, I64, I32, I32): ("nvshmemx_putmem_signal_block", I32)},
        is_pure=False, _semantic=_semantic,
    )  # fmt: skip


@core.extern
def signal_op(signal, value, op, pe, _semantic=None):
    return core.extern_elementwise(
        "", "", [signal, value, op, pe],
        {(I64, I64, I32, I32): ("nvshmemx_signal_op", I32)},
        is_pure=False, _semantic=_semantic,
    )  # fmt: skip


@core.extern
def quiet(_semantic=None):
    return core.extern_elementwise(
        "", "", [], {(): ("nvshmem_quiet", I32)}, is_pure=False, _semantic=_semantic
    )


@triton.jit(do_not_specialize=["signals_at", "kind", "me", "clock", "lag"])
def signal_remote_kernel(
    bases_ptr, pes_ptr, state_ptr, signals_at, kind, me, clock, lag, W: tl.constexpr
):
    """Program d waits until all that this rank has put is there, and then signals rank d."""
    d = tl.program_id(0)
    if tl.load(bases_ptr + d) == 0:
        epoch = tl.load(state_ptr + clock) - lag
        value = tl.where(tl.load(state_ptr + FAILED) == 0, epoch, last_word(state_ptr))
        slot = tl.load(bases_ptr + me) + signals_at + (kind * W + me) * 8
        quiet()
        tl.debug_barrier()
        signal_op(slot, value, tl.full([], SET, tl.int32), tl.load(pes_ptr + d))


@triton.jit(do_not_specialize=["counts_at", "signals_at", "kind", "me"])
def tell_counts_remote_kernel(
    bases_ptr, pes_ptr, state_ptr, stage_at, counts_at, signals_at, kind, me,
    W: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Program d puts this rank's counts into the memory of rank d, and the signal behind them."""
    d = tl.program_id(0)
    if tl.load(bases_ptr + d) == 0:
        home = tl.load(bases_ptr + me)
        epoch = tl.load(state_ptr + PUTS)
        row = counts_at + ((epoch & 1) * W + me) * M * 4
        value = tl.where(tl.load(state_ptr + FAILED) == 0, epoch, last_word(state_ptr))
        slot = home + signals_at + (kind * W + me) * 8
        num_bytes = tl.full([], M * 4, tl.int64)
        op = tl.full([], SET, tl.int32)
        put_signal(home + row, home + stage_at, num_bytes, slot, value, op, tl.load(pes_ptr + d))


@triton.jit(do_not_specialize=["me"])
def put_rows_remote_kernel(
    bases_ptr, pes_ptr, state_ptr, to_ptr, place_ptr, stage_at, stage_weight_at,
    rows_at, rows_size, weight_at, weight_size, me, clock,
    ROW_BYTES: tl.constexpr, SENT_BYTES: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    K: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """Program t puts token t, which lies in the stage, to the ranks that are not mapped."""
    t = tl.program_id(0).to(tl.int64)
    home = tl.load(bases_ptr + me)
    parity = (tl.load(state_ptr + clock) & 1).to(tl.int64)
    for k in tl.static_range(K):
        d = tl.load(to_ptr + t * K + k)
        if d >= 0:  # noqa: SIM102 - the address needs it
            if tl.load(bases_ptr + d) == 0:
                pe = tl.load(pes_ptr + d)
                place = tl.load(place_ptr + t * K + k).to(tl.int64)
                target = home + rows_at + parity * rows_size + place * ROW_BYTES
                source = home + stage_at + t * ROW_BYTES
                put_nbi(target, source, tl.full([], SENT_BYTES, tl.int64), pe)
                if META:
                    target = home + weight_at + parity * weight_size + place * WEIGHT_BYTES
                    source = home + stage_weight_at + (t * K + k) * WEIGHT_BYTES
                    put_nbi(target, source, tl.full([], WEIGHT_BYTES, tl.int64), pe)


@triton.jit(do_not_specialize=["me"])
def get_rows_remote_kernel(
    bases_ptr, pes_ptr, state_ptr, to_ptr, place_ptr, fetched_at, fetched_scalar_at,
    results_at, results_size, scalars_at, scalars_size, me, clock,
    ROW_BYTES: tl.constexpr, SENT_BYTES: tl.constexpr, WEIGHT_BYTES: tl.constexpr,
    K: tl.constexpr, SCALARS: tl.constexpr,
):  # fmt: skip
    """Program t gets the results of token t from ranks that are not mapped, by slot."""
    t = tl.program_id(0).to(tl.int64)
    home = tl.load(bases_ptr + me)
    parity = (tl.load(state_ptr + clock) & 1).to(tl.int64)
    for k in tl.static_range(K):
        d = tl.load(to_ptr + t * K + k)
        if d >= 0:  # noqa: SIM102 - the address needs it
            if tl.load(bases_ptr + d) == 0:
                pe = tl.load(pes_ptr + d)
                place = tl.load(place_ptr + t * K + k).to(tl.int64)
                source = home + results_at + parity * results_size + place * ROW_BYTES
                target = home + fetched_at + (t * K + k) * ROW_BYTES
                get_nbi(target, source, tl.full([], SENT_BYTES, tl.int64), pe)
                if SCALARS:
                    source = home + scalars_at + parity * scalars_size + place * WEIGHT_BYTES
                    target = home + fetched_scalar_at + (t * K + k) * WEIGHT_BYTES
                    get_nbi(target, source, tl.full([], WEIGHT_BYTES, tl.int64), pe)
    quiet()
