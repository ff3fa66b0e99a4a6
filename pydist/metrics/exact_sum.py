"""Sums of numbers without any rounding, as whole numbers that may be added in any order.

Note [Exact sums]
Every float64 is a whole multiple of 2^-1074, so a sum of them is one too: a whole number of some
two thousand bits. It is kept in digits of 32 bits, each in an int64 of its own, so that many
values can be added before a carry must be passed on. Adding a value changes three neighbouring
digits, by amounts that depend on that value alone. Whole numbers add up to the same in any order
and in any groups: a sum does not depend on which rank had which values, and the ranks' sums are
added by an all_reduce of int64. Only reading the result rounds, once.

This is the small superaccumulator of Neal 2015, "Fast Exact Summation Using Small and Large
Superaccumulators", arXiv 1505.05571, on vectors and with signed digits.
"""

import math

import torch
from torch import Tensor

from pydist.errors import InvalidUsage

_DIGIT_BITS = 32
_MASK = (1 << _DIGIT_BITS) - 1
# The exponent of the unit, the smallest float64 above zero.
_UNIT = -1074
# The largest float64 has 2098 bits; the digit after those takes carries.
_DIGITS = 67
# Elements of a sum's state: its digits, then how many values were NaN, +infinity, -infinity.
LENGTH = _DIGITS + 3
# Each value adds less than 2^32 to a digit, whose int64 has room for 2^31 of them; and temporaries
# take some ten times the memory of the values.
_VALUES_AT_ONCE = 1 << 18


def as_float64(values: Tensor, name: str = "values") -> Tensor:
    """`values` in float64, without rounding; of int64 two halves for each, in a dimension of 2.

    Raises:
        InvalidUsage: the values are complex, quantized or uint64.
    """
    values = values.detach()
    if values.dtype == torch.int64:
        # float64 has 53 bits.
        low = (values & _MASK).to(torch.float64)
        high = (values >> _DIGIT_BITS).to(torch.float64) * 2.0**_DIGIT_BITS
        return torch.stack([high, low])
    if values.is_complex() or values.is_quantized or values.dtype == torch.uint64:
        raise InvalidUsage(
            f"{name} has dtype {values.dtype}; exact sums take bool, integers up to int64 and "
            "floating-point numbers. Add real and imaginary parts apart."
        )
    return values.to(torch.float64)


def add_up(state: Tensor, values: Tensor) -> None:
    """Adds values to a sum: see Note [Exact sums].

    Args:
        state: int64, `LENGTH` elements; changed in place.
        values: float64, any shape, on the device of `state`.
    """
    for part in values.reshape(-1).split(_VALUES_AT_ONCE):
        bits = part.contiguous().view(torch.int64)
        exponent = (bits >> 52) & 0x7FF
        is_normal = (exponent > 0).to(torch.int64)
        mantissa = (bits & ((1 << 52) - 1)) | (is_normal << 52)
        mantissa *= exponent != 0x7FF
        position = exponent - is_normal
        digit, shift = position // _DIGIT_BITS, position % _DIGIT_BITS
        # These have at most 32 + 31 bits, and 21 + 31 bits and a carry.
        low = (mantissa & _MASK) << shift
        high = ((mantissa >> _DIGIT_BITS) << shift) + (low >> _DIGIT_BITS)
        sign = 1 - 2 * (bits < 0).to(torch.int64)
        state.index_add_(0, digit, sign * (low & _MASK))
        state.index_add_(0, digit + 1, sign * (high & _MASK))
        state.index_add_(0, digit + 2, sign * (high >> _DIGIT_BITS))
        state[_DIGITS] += part.isnan().sum()
        state[_DIGITS + 1] += part.isposinf().sum()
        state[_DIGITS + 2] += part.isneginf().sum()
        _carry(state)


def add_count(state: Tensor, count: int) -> None:
    """Adds a whole number, less than 2^40, to a sum."""
    digit, shift = divmod(-_UNIT, _DIGIT_BITS)
    state[digit] += count << shift
    _carry(state)


def _carry(state: Tensor) -> None:
    """Passes on what digits have above their 32 bits: room for more values, and other ranks'."""
    digits = state[: _DIGITS - 1]
    carries = digits >> _DIGIT_BITS
    digits &= _MASK
    state[1:_DIGITS] += carries


def total(state: Tensor) -> float:
    """The sum: the float64 nearest to it, ties to even; infinite beyond the range."""
    return _special(state) or _divided(_units(state), 1 << -_UNIT)


def quotient(numerator: Tensor, denominator: Tensor) -> float:
    """One sum divided by another: the float64 nearest to it; NaN where the divisor is zero."""
    divisor = _units(denominator)
    if divisor == 0 or _special(denominator):
        return math.nan
    return _special(numerator) or _divided(_units(numerator), divisor)


def _units(state: Tensor) -> int:
    """The sum of the finite values, in units of 2^-1074."""
    digits = state[:_DIGITS].tolist()
    return sum(digit << (_DIGIT_BITS * index) for index, digit in enumerate(digits))


def _special(state: Tensor) -> float:
    """What NaNs and infinities make of the sum; 0.0 where there are none."""
    nan, positive, negative = state[_DIGITS:].tolist()
    if nan or (positive and negative):
        return math.nan
    return math.inf if positive else -math.inf if negative else 0.0


def _divided(numerator: int, denominator: int) -> float:
    try:
        # Of Python's integers: as if divided without rounding, then rounded to nearest even.
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf
