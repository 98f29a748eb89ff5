"""Elementary functions that Triton lacks, accurate near zero, built from operations that the interpreter also has."""

import triton
import triton.language as tl

from .. import rows

CACHED_FACTOR: tl.constexpr = tl.constexpr(rows.CACHED_FACTOR)
# Replaces a log-prob of -inf. Its exp is 0 in fp32 and fp64, and 0 times it is 0 instead of NaN.
LOG_OF_NOTHING: tl.constexpr = tl.constexpr(-1000.0)
# Log-ratios are cut off here for sapo: exp(80) is finite in fp32, and the sigmoid is flat there.
FAR: tl.constexpr = tl.constexpr(80.0)
LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, corrected for the rounding of 1 + x (W. Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


# Triton decides at import whether kernels are interpreted.
INTERPRETED = not isinstance(log1p, triton.JITFunction)
UPCAST = tl.constexpr(INTERPRETED)


@triton.jit
def operands(a, b, ACC: tl.constexpr):
    """Cast the operands of a product to ACC if interpreted, because the interpreter multiplies bf16 as integers."""
    if UPCAST:
        a, b = a.to(ACC), b.to(ACC)
    return a, b


@triton.jit
def lift(x, DTYPE: tl.constexpr):
    """Round exponentials, which are at most 1, to DTYPE. For fp16, multiply them by CACHED_FACTOR first."""
    if DTYPE == tl.float16:
        x = x * CACHED_FACTOR
    if UPCAST and DTYPE == tl.bfloat16:  # the interpreter truncates, so round to even first
        bits = x.to(tl.int32, bitcast=True)
        x = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def fast_exp(x):
    """Compute exp(x) with the exp2 instruction. Results below 1.2e-38 are 0; the relative error grows by |x| 2^-24."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    else:
        return tl.exp2(x * LOG2_E)


@triton.jit
def expm1(x):
    """exp(x) - 1. Where exp(x) is near 1, it is corrected for rounding as in `log1p`."""
    u = tl.exp(x)
    near = (u > 0.25) & (u < 4.0) & (u != 1.0)
    corrected = (u - 1.0) * (x / tl.log(tl.where(near, u, 2.0)))
    return tl.where(near, corrected, tl.where(u == 1.0, x, u - 1.0))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), also for -inf and inf. NaN propagates."""
    return tl.maximum(x, 0.0) + log1p(tl.exp(-tl.abs(x)))


@triton.jit
def difference(a, b):
    """Compute a - b and its rounding error (D. E. Knuth). The error is 0 where a - b is not finite."""
    d = a - b
    minus_b = d - a
    error = (a - (d - minus_b)) - (b + minus_b)
    return d, tl.where(error == error, error, 0.0)


@triton.jit
def tanh(x):
    """tanh(x) from exp(-2 |x|). Near zero, where this would cancel, an odd polynomial replaces it."""
    y = x * x
    if x.dtype == tl.float64:  # Taylor polynomial, only where terms up to x^11 are enough
        near = tl.abs(x) < 0.02
        series = 0.02186948853615520 - y * 0.00886323552990220
        series = -0.33333333333333333 + y * (0.13333333333333333 + y * (-0.05396825396825397 + y * series))
    else:  # minimax (S. L. Moshier, Cephes, tanhf)
        near = tl.abs(x) < 0.625
        series = 2.06390887954e-2 - y * 5.70498872745e-3
        series = -3.33332819422e-1 + y * (1.33314422036e-1 + y * (-5.37397155531e-2 + y * series))
    e = fast_exp(-2.0 * tl.abs(x))
    far = 1.0 - 2.0 * e / (1.0 + e)
    return tl.where(near, x + x * (y * series), tl.where(x < 0, -far, far))


@triton.jit
def finite(largest):
    """Replace -inf by 0 in a maximum, so that it can be subtracted before exp."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def at_least(x, bound):
    """max(x, bound). NaN propagates."""
    return tl.where(x < bound, bound, x)


@triton.jit
def at_most(x, bound):
    """min(x, bound). NaN propagates."""
    return tl.where(x > bound, bound, x)
