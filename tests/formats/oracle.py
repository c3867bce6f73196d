"""FP4 once more, slowly and in plain numpy, to hold the package against.

Written from the equations of method.md 1.12 (order of operations), 1.6 (the table of the low bit),
2.14 (4/6) and 3.4 (MX), and from no code of the package: rounding compares with midpoints, E4M3 is
a table of 127 values, MX scales are searched for, neighbours are looked up. Every operation on
float32 arrays is one float32 rounding. Codes are one a byte, scales the bytes that the format
stores. Where no grid is named, it is E2M1's.
"""

from typing import NamedTuple

import numpy as np

FMAX = np.finfo(np.float32).max
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CODE_VALUES = np.concatenate([GRID, -GRID])  # by code 0..15; code 8, which we never write, is -0
_EIGHTHS = np.arange(8) / 8
E4M3 = np.array(  # by byte 0..126; byte 127 is NaN
    [_EIGHTHS * 2.0**-6, *((1 + _EIGHTHS) * 2.0 ** (e - 7) for e in range(1, 16))], np.float32
).ravel()[:127]
_WITH_NAN = np.append(E4M3, np.float32(np.nan))
CODE_VALUES_8 = np.concatenate([_WITH_NAN, -_WITH_NAN])  # by code 0..255
NAN_E4M3, NAN_E8M0 = 127, 255
NV = {"nvfp4": 2688, "nvfp4_4over6": 1536}  # what the outer scale brings the largest value to

# Table 1.6: bracket (codes) -> the magnitude that recorded low bit 0 picks, and low bit 1.
LOW1 = {
    (0, 1): (0, 0.5),
    (1, 2): (1, 0.5),
    (2, 3): (1, 1.5),
    (3, 4): (2, 1.5),
    (4, 5): (2, 3),
    (5, 6): (4, 3),
    (6, 7): (4, 6),
}


class Quantized(NamedTuple):
    codes: np.ndarray  # uint8 [..., n]
    scales: np.ndarray  # uint8 [..., n/b], the bytes of e4m3 or e8m0
    outer: np.ndarray | None  # float32, a prefix of the leading axes
    values: np.ndarray  # float32 [..., n]


def nearest(table: np.ndarray, a: np.ndarray) -> np.ndarray:
    """Index of the entry of the rising table nearest to a; ties to the even index; saturating."""
    middles = (table[1:].astype(np.float64) + table[:-1]) / 2
    odd = np.arange(len(middles)) % 2 == 1
    a = np.asarray(a, np.float64)[..., None]
    return np.sum((a > middles) | (odd & (a == middles)), axis=-1).astype(np.uint8)


def grid_of(fmt: str) -> np.ndarray:
    """Magnitudes by code."""
    return E4M3 if fmt == "mxfp8" else GRID


def values_of(grid: np.ndarray) -> np.ndarray:
    """Values by code; the second half of them is negative."""
    return CODE_VALUES_8 if grid is E4M3 else CODE_VALUES


def with_sign(magnitude: np.ndarray, z: np.ndarray, grid: np.ndarray = GRID) -> np.ndarray:
    sign = len(values_of(grid)) // 2
    return (magnitude + sign * ((z < 0) & (magnitude > 0))).astype(np.uint8)


def encode(z: np.ndarray, grid: np.ndarray = GRID) -> np.ndarray:
    """Codes uint8 nearest to z; NaN becomes 0."""
    z = np.where(np.isnan(z), np.float32(0), np.asarray(z, np.float32))
    return with_sign(nearest(grid, np.abs(z)), z, grid)


def pick_magnitude(z: float, recorded: int, encoding: str, grid: np.ndarray = GRID) -> int:
    """Magnitude code that guidance gives one value z within the grid for the recorded bits."""
    a, values = abs(z), values_of(grid)
    low = int(np.searchsorted(grid, a)) - 1
    if a == grid[low + 1]:
        return low + 1
    if encoding == "low1" and grid is GRID:
        return int(np.flatnonzero(GRID == LOW1[low, low + 1][recorded])[0])
    if encoding == "low1":
        return next(code for code in (low, low + 1) if code % 2 == recorded)
    if encoding == "low2":  # of the codes with these low bits the one closest to z
        alike = [code for code in range(recorded, len(values), 4) if not np.isnan(values[code])]
        recorded = min(alike, key=lambda code: abs(values[code] - z))
    sign = -1 if z < 0 else 1
    return min((low, low + 1), key=lambda code: abs(sign * grid[code] - values[recorded]))


def guided_codes(
    z: np.ndarray, recorded: np.ndarray, encoding: str, grid: np.ndarray = GRID
) -> np.ndarray:
    """Codes uint8 [...] of guided rounding, a value at a time; `recorded` has the bits kept."""
    z = np.clip(np.where(np.isnan(z), np.float32(0), z), -grid[-1], grid[-1])
    pairs = zip(z.flat, recorded.flat, strict=True)
    picked = [pick_magnitude(value, int(bits), encoding, grid) for value, bits in pairs]
    return with_sign(np.array(picked, np.uint8).reshape(z.shape), z, grid)


def decode_scales(scales: np.ndarray, fmt: str) -> np.ndarray:
    if fmt in NV:
        return _WITH_NAN[scales]
    powers = 2.0 ** (scales.astype(np.float64) - 127)
    return np.where(scales == NAN_E8M0, np.nan, powers).astype(np.float32)


def _blocks(x: np.ndarray, fmt: str) -> np.ndarray:
    return x.reshape(*x.shape[:-1], -1, 16 if fmt in NV else 32)


def _prefix(outer: np.ndarray, ndim: int) -> np.ndarray:
    return outer.reshape(outer.shape + (1,) * (ndim - outer.ndim))


def scales_of(x: np.ndarray, fmt: str, outer) -> tuple[np.ndarray, np.ndarray | None]:
    """Scale bytes [..., n/b] and outer scale of float32 x [..., n]; `outer` as in the package."""
    amax = np.max(np.abs(_blocks(x, fmt)), axis=-1)
    if fmt not in NV:
        return np.vectorize(lambda a: _e8m0_byte(float(a), fmt), otypes=[np.uint8])(amax), None
    with np.errstate(all="ignore"):
        if isinstance(outer, str):
            total = np.max(amax, axis=-1 if outer == "row" else None)
            encoding = np.minimum(np.float32(NV[fmt]) / total, FMAX)
            encoding = np.where((total == 0) | (encoding == 0), np.float32(1), encoding)
            outer = np.float32(1) / encoding
        else:
            outer = np.asarray(outer, np.float32)
            encoding = np.float32(1) / outer
        if fmt == "nvfp4_4over6":
            return _four_over_six(x, amax, _prefix(encoding, amax.ndim), outer), outer
        sixth = encoding * (np.float32(1) / np.float32(6))
        return _e4m3_byte(amax * _prefix(sixth, amax.ndim)), outer


def _e4m3_byte(scale: np.ndarray) -> np.ndarray:
    scale = np.minimum(np.minimum(scale, FMAX), np.float32(448))
    return np.where(np.isnan(scale), np.uint8(NAN_E4M3), nearest(E4M3, scale))


def _four_over_six(x, amax, encoding, outer) -> np.ndarray:
    """Of the two scale bytes of each block, that with the smaller error; of equals, map to 6."""
    base = amax / np.float32(6) * encoding
    candidates = [_e4m3_byte(base), _e4m3_byte(base * np.float32(1.5))]
    six, four = (four_over_six_error(x, scales, encoding, outer) for scales in candidates)
    return np.where(four < six, candidates[1], candidates[0])


def four_over_six_error(x, scales, encoding, outer, dtype=np.float32) -> np.ndarray:
    """Squared error [..., n/16] in units of the outer scale, value by value, each rounded once."""
    codes = encode(normalise(x, scales, outer, "nvfp4"))
    seen = _blocks(x, "nvfp4").astype(dtype) * encoding.astype(dtype)[..., None]
    units = decode_scales(scales, "nvfp4").astype(dtype)[..., None]
    squares = (_blocks(CODE_VALUES[codes], "nvfp4").astype(dtype) * units - seen) ** 2
    total = squares[..., 0]
    for i in range(1, 16):
        total = total + squares[..., i]
    return total


def _e8m0_byte(amax: float, fmt: str) -> int:
    if np.isnan(amax):
        return NAN_E8M0
    if np.isinf(amax):
        amax = 2.0**128  # the bits of Inf read as a number
    if fmt != "mxfp4_floor":  # the smallest power of two that does not saturate
        largest = float(grid_of(fmt)[-1])
        exponent = next(e for e in range(-127, 128) if amax <= largest * 2.0**e)
    else:
        exponent = -127 if amax == 0 else int(np.floor(np.log2(amax))) - 2
    return int(np.clip(exponent + 127, 0, 254))


def _factor(scales, outer, fmt):
    factor = decode_scales(scales, fmt)
    return factor if outer is None else factor * _prefix(outer, factor.ndim)


def normalise(x: np.ndarray, scales: np.ndarray, outer, fmt: str) -> np.ndarray:
    """z float32 [..., n]."""
    with np.errstate(all="ignore"):
        multiplier = np.minimum(np.float32(1) / _factor(scales, outer, fmt), FMAX)
        return (_blocks(x, fmt) * multiplier[..., None]).reshape(x.shape)


def dequantize(codes: np.ndarray, scales: np.ndarray, outer, fmt: str) -> np.ndarray:
    """Float32 [..., n]; +0 in a block whose scale is 0."""
    with np.errstate(all="ignore"):
        factor = _factor(scales, outer, fmt)[..., None]
        values = _blocks(values_of(grid_of(fmt))[codes], fmt) * factor
    return np.where(factor == 0, np.float32(0), values).reshape(codes.shape)


def quantize(x: np.ndarray, fmt: str, outer="row") -> Quantized:
    """x [..., n] (float32, or bfloat16 widened first) rounded to nearest."""
    x = np.asarray(x).astype(np.float32)
    scales, outer = scales_of(x, fmt, outer)
    codes = encode(normalise(x, scales, outer, fmt), grid_of(fmt))
    return Quantized(codes, scales, outer, dequantize(codes, scales, outer, fmt))


def quantize_guided(x: np.ndarray, rollout: Quantized, fmt: str, encoding: str) -> Quantized:
    """x [..., n] under the scales of `rollout`, guided by what `encoding` keeps of its codes."""
    recorded = rollout.codes & {"codes": 255, "low2": 3, "low1": 1}[encoding]
    z = normalise(np.asarray(x).astype(np.float32), rollout.scales, rollout.outer, fmt)
    codes = guided_codes(z, recorded, encoding, grid_of(fmt))
    values = dequantize(codes, rollout.scales, rollout.outer, fmt)
    return Quantized(codes, rollout.scales, rollout.outer, values)


# What both sides of a comparison look like. Only here does the oracle know of the package's pytree.


def read(q) -> Quantized:
    """A BlockScaled as numpy arrays: codes unpacked by hand, scales as bytes with one NaN."""
    codes = np.asarray(q.codes)
    if q.fmt != "mxfp8":  # two a byte
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(q.shape)
    scales = np.asarray(q.scales).view(np.uint8)
    if q.fmt in NV:  # E4M3 has a NaN of each sign
        scales = np.where(scales & 127 == NAN_E4M3, np.uint8(NAN_E4M3), scales)
    outer = None if q.outer is None else np.asarray(q.outer)
    return Quantized(codes, scales, outer, dequantize(codes, scales, outer, q.fmt))


def assert_same_bits(actual, expected):
    """Arrays of one dtype and shape, equal to the bit: -0 is not 0; but one NaN is like another."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    np.testing.assert_array_equal(actual, expected)
    if np.issubdtype(actual.dtype, np.floating):
        numbers = ~np.isnan(expected)
        np.testing.assert_array_equal(
            np.signbit(actual[numbers]), np.signbit(expected[numbers]), "signs of zeros"
        )


def assert_same_but_near_ties(q, expected: Quantized, share=2e-3):
    """`assert_same`, but for a share of blocks whose scales differ.

    For 4/6: XLA of JAX 0.10 on CPU fuses products into sums across barriers, so that a block whose
    two errors are within a rounding of each other may fall either way.
    """
    actual = read(q)
    other = actual.scales != expected.scales
    assert other.mean() <= share
    same = np.repeat(~other, actual.codes.shape[-1] // other.shape[-1], axis=-1)
    np.testing.assert_array_equal(actual.codes[same], expected.codes[same])
    assert_same_bits(actual.outer, expected.outer)


def assert_same(q, expected: Quantized):
    """A BlockScaled equal to the oracle's in every code, scale byte and outer scale."""
    actual = read(q)
    np.testing.assert_array_equal(actual.scales, expected.scales)
    np.testing.assert_array_equal(actual.codes, expected.codes)
    if expected.outer is None:
        assert actual.outer is None
    else:
        assert_same_bits(actual.outer, expected.outer)
