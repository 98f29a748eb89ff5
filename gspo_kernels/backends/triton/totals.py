"""Partial results of sequences, and the one program that adds them up to the loss and the metrics."""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false
# Triton types its kernels' arguments in a language of its own.

import triton
import triton.language as tl

# Rows of the partial results, [PARTIALS, S]: sums over a sequence's tokens, two extremes, and u.
LOSS, LENGTH, LOW, HIGH, MINUS_R, DEAD, KL, ENTROPY, RATIO, RATIO_MIN, RATIO_MAX = (tl.constexpr(i) for i in range(11))
PARTIALS = tl.constexpr(11)


@triton.jit(do_not_specialize=["sequences"])
def finish(partials, loss, values, sequences: tl.int64, RATIO_KIND: tl.constexpr, BLOCK: tl.constexpr):
    """One program: the loss [] and the metrics, in the order of `metrics.NAMES`, from the partial results."""
    low, high = _total(partials, sequences, LOW, 0, BLOCK), _total(partials, sequences, HIGH, 0, BLOCK)
    some_low, some_high = _total(partials, sequences, LOW, 1, BLOCK), _total(partials, sequences, HIGH, 1, BLOCK)
    some = _total(partials, sequences, LOW, 2, BLOCK)
    length, filled = _total(partials, sequences, LENGTH, 0, BLOCK), _total(partials, sequences, LENGTH, 1, BLOCK)
    tokens, rows = tl.maximum(length, 1.0), tl.maximum(filled, 1.0)
    count = length if RATIO_KIND == 2 else filled
    ratio = _total(partials, sequences, RATIO, 0, BLOCK)
    smallest = _total(partials, sequences, RATIO_MIN, 3, BLOCK)
    largest = _total(partials, sequences, RATIO_MAX, 4, BLOCK)
    kind = values.dtype.element_ty
    tl.store(loss, _total(partials, sequences, LOSS, 0, BLOCK).to(kind))
    tl.store(values + 0, (some / rows).to(kind))
    tl.store(values + 1, (some_low / rows).to(kind))
    tl.store(values + 2, (some_high / rows).to(kind))
    tl.store(values + 3, ((low + high) / tokens).to(kind))
    tl.store(values + 4, (low / tokens).to(kind))
    tl.store(values + 5, (high / tokens).to(kind))
    tl.store(values + 6, tl.where(count > 0, ratio / tl.maximum(count, 1.0), 1.0).to(kind))
    # Extremes skip NaN, sums keep it.
    tl.store(values + 7, tl.where(ratio != ratio, ratio, tl.where(count > 0, smallest, 1.0)).to(kind))
    tl.store(values + 8, tl.where(ratio != ratio, ratio, tl.where(count > 0, largest, 1.0)).to(kind))
    tl.store(values + 9, (_total(partials, sequences, MINUS_R, 0, BLOCK) / tokens).to(kind))
    tl.store(values + 10, (_total(partials, sequences, DEAD, 0, BLOCK) / tokens).to(kind))
    tl.store(values + 11, (_total(partials, sequences, KL, 0, BLOCK) / tokens).to(kind))
    tl.store(values + 12, (_total(partials, sequences, ENTROPY, 0, BLOCK) / tokens).to(kind))


@triton.jit
def _total(partials, sequences, ROW: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Over all sequences of one partial result: 0 the sum, 1 how many are > 0, 2 of LOW + HIGH, 3 least, 4 largest."""
    neutral = float("inf") if KIND == 3 else float("-inf") if KIND == 4 else 0.0
    found = tl.full([BLOCK], neutral, tl.float64)
    for start in range(0, sequences, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        x = tl.load(partials + ROW * sequences + i, mask=i < sequences, other=neutral)
        if KIND == 0:
            found += x
        elif KIND == 1:
            found += tl.where(x > 0, 1.0, 0.0)
        elif KIND == 2:
            x += tl.load(partials + HIGH * sequences + i, mask=i < sequences, other=0.0)
            found += tl.where(x > 0, 1.0, 0.0)
        elif KIND == 3:
            found = tl.minimum(found, x)
        else:
            found = tl.maximum(found, x)
    if KIND == 3:
        return tl.min(found, 0)
    elif KIND == 4:
        return tl.max(found, 0)
    else:
        return tl.sum(found, 0)
