"""How ranks agree on the GPU: signals, waits, counts and places.

The same kernels run in Triton's interpreter on the CPU. What that takes: no inline assembly but
the clock of a timed wait, and no program that waits for another one of its own launch, since the
interpreter runs them one after the other. A wait is a launch of its own with one small program
for each source, so that waiting ranks cannot fill a GPU that they share.

Memory order, after the PTX model. Writer: stores of rows by any thread, then the end of the
kernel or a barrier, then one release at system scope. Reader: an acquire at system scope by one
thread, then the end of the kernel. A release covers all that happened before it, kernels of the
stream included. Before Triton 3.9 no barrier precedes a scalar release by itself.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

# Places in the state of a rank, int64. The first two are its clocks.
PUTS = tl.constexpr(0)
RETURNS = tl.constexpr(1)
FAILED = tl.constexpr(2)  # 0, or 1 + the kind that was waited for
FAILED_EPOCH = tl.constexpr(3)
FAILED_SOURCE = tl.constexpr(4)
FAILED_SEEN = tl.constexpr(5)
NUM_LATE = tl.constexpr(6)
FAILED_LAYER = tl.constexpr(7)
REFUSED = tl.constexpr(8)  # 0, or 1 + which term
REFUSED_RANK = tl.constexpr(9)
REFUSED_VALUE = tl.constexpr(10)
OVERFLOWED = tl.constexpr(11)  # rows that did not fit at the fullest rank; sticky
DROPPED = tl.constexpr(12)  # routes of this rank that were dropped, since the beginning
MOST_ROWS = tl.constexpr(13)  # that wanted to come to one rank
STATE_SIZE = tl.constexpr(16)

# The signal of a rank that has given up; plus 1 + the rank that it had waited for, if any.
ABORTED = tl.constexpr(1 << 62)


@triton.jit(do_not_specialize=["clock"])
def advance_kernel(state_ptr, clock):
    """Begin the next epoch of a clock: an argument would be frozen in a CUDA graph."""
    tl.store(state_ptr + clock, tl.load(state_ptr + clock) + 1)


@triton.jit
def note_kernel(state_ptr, host_ptr, SIZE: tl.constexpr):
    """Copy the state into pinned memory of the host.

    A kernel and not a copy: copies of all streams of a GPU share a queue, and one that comes
    after a wait would hold up the copies of the very rank that is waited for.
    """
    i = tl.arange(0, SIZE)
    tl.store(host_ptr + i, tl.load(state_ptr + i))


@triton.jit(do_not_specialize=["num_slots"])
def clean_ids_kernel(
    expert_ptr, clean_ptr, bad_ptr, num_slots,
    E: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask ids of no expert, and count those that are not -1.

    Example: E = 4, ids (3, -1, 4, -7): clean is (3, -1, -1, -1), and two more are bad.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = slot < num_slots
    expert = tl.load(expert_ptr + slot, mask=here, other=-1)
    known = (expert >= 0) & (expert < E)
    tl.store(clean_ptr + slot, tl.where(known, expert, -1), mask=here)
    bad = tl.sum((here & (expert != -1)).to(tl.int32) - (here & known).to(tl.int32), axis=0)
    if bad > 0:
        tl.atomic_add(bad_ptr, bad.to(bad_ptr.dtype.element_ty))


@triton.jit
def last_word(state_ptr):
    """Return what a rank that has failed signals: who was to blame, as far as it knows.

    Example: it waited for rank 3, which said that it had waited for rank 5: so it says 5, too.
    """
    source = tl.load(state_ptr + FAILED_SOURCE)
    seen = tl.load(state_ptr + FAILED_SEEN)
    own = tl.load(state_ptr + FAILED) >= ABORTED
    word = tl.where(seen > ABORTED, seen, source + 1 + ABORTED)
    return tl.where(own, tl.full([], ABORTED, tl.int64), word)


@triton.jit(do_not_specialize=["signals_at", "kind", "me", "clock", "lag"])
def signal_kernel(bases_ptr, state_ptr, signals_at, kind, me, clock, lag, W: tl.constexpr):
    """Program d tells rank d that all this rank did before is there to be seen.

    Invariant: slot ``(kind, me)`` of a rank is written by rank ``me`` alone, and only grows. A
    rank that has failed has a last word instead, which ends every wait for it.

    Example: kind 1, rank 2 of 4, clock at epoch 7, lag 0. Program 3 stores 7 to word
    ``1 * 4 + 2`` of the signals of rank 3.
    """
    d = tl.program_id(0)
    base = tl.load(bases_ptr + d)
    epoch = tl.load(state_ptr + clock) - lag
    value = tl.where(tl.load(state_ptr + FAILED) == 0, epoch, last_word(state_ptr))
    if base != 0:
        slot = (base + signals_at).to(tl.pointer_type(tl.int64)) + kind * W + me
        tl.debug_barrier()
        tl.atomic_xchg(slot, value, sem="release", scope="sys")


@triton.jit(do_not_specialize=["kind", "clock", "lag", "layer", "limit_ns"])
def wait_kernel(
    signals_ptr, state_ptr, kind, clock, lag, layer, limit_ns,
    W: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Program s waits until rank s has signalled the epoch, or until the time is over.

    Invariant: signals lie in this rank's own memory, so polling loads no link. Who finds the rank
    failed does not wait: after one missed deadline the rest of the step passes at once. In the
    interpreter the host has waited, and this is the acquire and the check.

    Example: epoch 7, lag 2, signals (5, 4, 6). Program 1 sees 4 < 5 until its time is over,
    and notes that rank 1 was late with epoch 5 and had signalled 4.
    """
    s = tl.program_id(0)
    epoch = tl.load(state_ptr + clock) - lag
    if (epoch > 0) & (tl.load(state_ptr + FAILED) == 0):
        slot = signals_ptr + kind * W + s
        seen = tl.atomic_add(slot, 0, sem="acquire", scope="sys")
        if TIMED:
            start = globaltimer()
            now = start
            while (seen < epoch) & (now - start < limit_ns):
                seen = tl.atomic_add(slot, 0, sem="acquire", scope="sys")
                now = globaltimer()
        if (seen < epoch) | (seen >= ABORTED):
            tl.atomic_add(state_ptr + NUM_LATE, 1)
            zero = tl.full([], 0, tl.int64)
            first = tl.atomic_cas(state_ptr + FAILED, zero, kind.to(tl.int64) + 1)
            if first == 0:
                tl.store(state_ptr + FAILED_EPOCH, epoch)
                tl.store(state_ptr + FAILED_SOURCE, s.to(tl.int64))
                tl.store(state_ptr + FAILED_SEEN, seen)
                tl.store(state_ptr + FAILED_LAYER, layer.to(tl.int64))


@triton.jit(do_not_specialize=["signals_at", "me"])
def abort_kernel(bases_ptr, state_ptr, signals_at, me, W: tl.constexpr, KINDS: tl.constexpr):
    """Program d ends every wait of rank d for this rank, and marks this rank as failed."""
    d = tl.program_id(0)
    base = tl.load(bases_ptr + d)
    tl.atomic_cas(state_ptr + FAILED, tl.full([], 0, tl.int64), tl.full([], ABORTED, tl.int64))
    tl.debug_barrier()
    word = last_word(state_ptr)
    if base != 0:
        for kind in tl.static_range(KINDS):
            slot = (base + signals_at).to(tl.pointer_type(tl.int64)) + kind * W + me
            tl.atomic_xchg(slot, word, sem="release", scope="sys")


@triton.jit(do_not_specialize=["counts_at", "me"])
def tell_counts_kernel(
    bases_ptr, state_ptr, told_ptr, counts_at, me,
    W: tl.constexpr, M: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Program d copies this rank's counts into row ``me`` of the counts of rank d."""
    d = tl.program_id(0)
    base = tl.load(bases_ptr + d)
    parity = tl.load(state_ptr + PUTS) & 1
    m = tl.arange(0, BLOCK_M)
    told = tl.load(told_ptr + m, mask=m < M, other=0)
    if base != 0:
        row = (base + counts_at).to(tl.pointer_type(tl.int32)) + (parity * W + me) * M
        tl.store(row + m, told, mask=m < M)


@triton.jit
def fair_share(count, total, C):
    """Cut counts to at most C in all: the same for everyone, or all one has if that is less.

    Example: (3, 1), (2, 0) and C = 4: the level is 1, and the first that has more gets one more.
    """
    low = total * 0
    high = tl.minimum(total, C)
    # The largest level at which min(count, level) fits: 31 halvings of at most 2**31.
    for _ in range(0, 31):
        level = (low + high + 1) // 2
        fits = tl.sum(tl.sum(tl.minimum(count, level), axis=1), axis=0) <= C
        low = tl.where(fits, level, low)
        high = tl.where(fits, high, level - 1)
    cut = tl.minimum(count, low)
    left = C - tl.sum(tl.sum(cut, axis=1), axis=0)
    more = (count > low).to(tl.int32)
    of_rows = tl.sum(more, axis=1)
    number = (tl.cumsum(of_rows, axis=0) - of_rows)[:, None] + tl.cumsum(more, axis=1)
    return cut + tl.where((more > 0) & (number <= left), 1, 0)


@triton.jit
def check_terms(term_ptr, state_ptr, w, me, failed, W: tl.constexpr, M: tl.constexpr):
    """Note what ranks said beside their counts: bad ids, and 1 or 2 for gradients off or on."""
    bad = tl.load(term_ptr + w * M, mask=w < W, other=0)
    grad = tl.load(term_ptr + w * M + 1, mask=w < W, other=0)
    own = tl.sum(tl.where(w == me, grad, 0), axis=0)
    unlike = ((grad != own) & (grad > 0) & (w < W)).to(tl.int32)
    if (failed == 0) & (tl.sum(bad, axis=0) > 0):
        rank = tl.min(tl.where(bad > 0, w, W), axis=0)
        tl.store(state_ptr + REFUSED, 1)
        tl.store(state_ptr + REFUSED_RANK, rank.to(tl.int64))
        value = tl.sum(tl.where(w == rank, bad, 0), axis=0)
        tl.store(state_ptr + REFUSED_VALUE, value.to(tl.int64))
    if (failed == 0) & (tl.sum(unlike, axis=0) > 0):
        rank = tl.min(tl.where(unlike > 0, w, W), axis=0)
        tl.store(state_ptr + REFUSED, 2)
        tl.store(state_ptr + REFUSED_RANK, rank.to(tl.int64))
        tl.store(state_ptr + REFUSED_VALUE, own.to(tl.int64))


@triton.jit(do_not_specialize=["me"])
def plan_kernel(
    counts_ptr, state_ptr, first_E_ptr, kept_E_ptr, offsets_e1_ptr, place_W1_ptr, me, C,
    W: tl.constexpr, E_OF_RANK: tl.constexpr, M: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_E: tl.constexpr, BOUNDED: tl.constexpr, DROPS: tl.constexpr,
):  # fmt: skip
    """Program d finds where this rank's rows go in the memory of rank d.

    Every rank has the same counts, so every rank finds the same places, and no second message is
    needed. Rows lie in the order (expert, source, token). If more come than fit, each (source,
    expert) keeps the same number, or all it has if that is less: the largest number for which
    they fit, and one more for the first few until the buffer is full.

    Example: 2 sources with counts (3, 1) and (2, 0) for the 2 experts of rank d, C = 6. Expert 0
    has rows 0..4, of which source 1 has 3..4; expert 1 has row 5. With C = 4 the level is 1:
    (1, 1) and (1, 0) are kept, and one more of the first cell.
    """
    d = tl.program_id(0)
    parity = tl.load(state_ptr + PUTS) & 1
    failed = tl.load(state_ptr + FAILED)
    w = tl.arange(0, BLOCK_W)
    i = tl.arange(0, BLOCK_E)
    here = (w[:, None] < W) & (i[None, :] < E_OF_RANK)
    counts_ptr += parity * W * M
    count = tl.load(
        counts_ptr + w[:, None] * M + d * E_OF_RANK + i[None, :], mask=here, other=0
    )  # [BLOCK_W, BLOCK_E]
    count = tl.where(failed == 0, count, 0)  # a rank that failed has no counts to trust
    total = tl.sum(tl.sum(count, axis=1), axis=0)
    kept = count
    if BOUNDED:
        cut = fair_share(count, total, C)
        kept = tl.where(total > C, cut, count)
        tl.atomic_max(state_ptr + OVERFLOWED, tl.maximum(total - C, 0).to(tl.int64))
    tl.atomic_max(state_ptr + MOST_ROWS, total.to(tl.int64))

    of_expert = tl.sum(kept, axis=0)  # [BLOCK_E]
    begin = tl.cumsum(of_expert, axis=0) - of_expert
    before = tl.cumsum(kept, axis=0) - kept
    mine = w[:, None] == me
    first = begin + tl.sum(tl.where(mine, before, 0), axis=0)
    kept_mine = tl.sum(tl.where(mine, kept, 0), axis=0)
    if DROPS:
        lost = tl.sum(tl.sum(tl.where(mine, count - kept, 0), axis=1), axis=0)
        tl.atomic_add(state_ptr + DROPPED, lost.to(tl.int64))
    tl.store(first_E_ptr + d * E_OF_RANK + i, first, mask=i < E_OF_RANK)
    tl.store(kept_E_ptr + d * E_OF_RANK + i, kept_mine, mask=i < E_OF_RANK)

    # Tokens for rank d lie in the order (source, token) where each travels once.
    tokens = tl.load(counts_ptr + w * M + W * E_OF_RANK + d, mask=w < W, other=0)  # [BLOCK_W]
    tokens = tl.where(failed == 0, tokens, 0)
    tl.store(place_W1_ptr + d, tl.sum(tl.where(w < me, tokens, 0), axis=0))
    if d == me:
        tl.store(offsets_e1_ptr + i, begin, mask=i < E_OF_RANK)
        tl.store(offsets_e1_ptr + E_OF_RANK, tl.sum(of_expert, axis=0))
        tl.store(place_W1_ptr + W, tl.sum(tokens, axis=0))
        term_ptr = counts_ptr + W * E_OF_RANK + W
        check_terms(term_ptr, state_ptr, w, me, failed, W, M)


@triton.jit(do_not_specialize=["num_slots"])
def slots_kernel(
    expert_ptr, row_of_slot_ptr, offsets_E1_ptr, first_E_ptr, kept_E_ptr, rank_ptr, row_ptr,
    num_slots, C,
    E: tl.constexpr, E_OF_RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Turn the expert of each route into a rank and a row there, -1 if the route goes nowhere.

    Invariant: a row is in ``0..C-1`` whatever the counts say, so that no store can go astray.
    """
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    here = slot < num_slots
    expert = tl.load(expert_ptr + slot, mask=here, other=-1)
    known = here & (expert >= 0) & (expert < E)
    expert = tl.where(known, expert, 0)
    place = tl.load(row_of_slot_ptr + slot, mask=known, other=0)
    within = place - tl.load(offsets_E1_ptr + expert, mask=known, other=0)
    kept = within < tl.load(kept_E_ptr + expert, mask=known, other=0)
    row = within + tl.load(first_E_ptr + expert, mask=known, other=0)
    goes = known & kept & (row >= 0) & (row < C)
    tl.store(rank_ptr + slot, tl.where(goes, expert // E_OF_RANK, -1), mask=here)
    tl.store(row_ptr + slot, tl.where(goes, row, -1), mask=here)
