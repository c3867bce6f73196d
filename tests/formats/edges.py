"""Rows on which FP4 arithmetic has to decide something: the cases of method.md 3.3, and test data.

No row holds float32 subnormals or leads to one: backends that flush them to zero may differ there.
"""

import ml_dtypes
import numpy as np

WIDTH = 64


def draw(rows: int, width: int, seed: int = 0, spread: float = 1.0) -> np.ndarray:
    """Float32 [rows, width]: Gaussian values with log-normal gains of channels and of rows."""
    rng = np.random.default_rng(seed)
    logs = rng.standard_normal((1, width)) + rng.standard_normal((rows, 1))
    return (rng.standard_normal((rows, width)) * np.exp(spread * logs)).astype(np.float32)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16)


def _row(*starts: tuple[int, list[float]], scale: float = 1.0) -> np.ndarray:
    """A Gaussian row with values written over it from given positions on."""
    row = draw(1, WIDTH, seed=7, spread=0.3)[0] * np.float32(scale)
    for start, values in starts:
        row[start : start + len(values)] = values
    return row


def _block_of(value: float) -> list[float]:
    return [value * (-1) ** i * (16 - i) / 16 for i in range(16)]


FMAX = float(np.finfo(np.float32).max)
EDGE_ROWS = {
    "zero block": _row((16, [0.0] * 16)),
    "zero row": np.zeros(WIDTH, np.float32),
    # A maximum of 2688 makes the outer scale exactly 1: block scales are what they look like.
    "scale underflows": _row((0, [2688.0]), (16, _block_of(6 * 2.0**-11))),
    "scale just survives": _row((0, [2688.0]), (16, _block_of(6 * 2.0**-10 * 1.001))),
    "scale is E4M3-subnormal": _row((0, [2688.0]), (16, _block_of(6 * 3 * 2.0**-9))),
    "scale rounds down": _row((0, [2688.0]), (16, _block_of(6 * 1.0624))),
    "scale rounds up": _row((0, [2688.0]), (16, _block_of(6 * 1.0626))),
    "+Inf": _row((5, [np.inf])),
    "-Inf": _row((5, [-np.inf])),
    "NaN": _row((5, [np.nan])),
    "NaN and Inf": _row((5, [np.nan, np.inf])),
    "signed zeros": _row((0, [-0.0, 0.0] * 8)),
    "on the grid": _row((0, [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 2688.0])),
    "largest float32": _row((0, [FMAX, -FMAX / 2]), scale=1e37),
    "small but normal": _row(scale=1e-33),
    "one value": np.eye(1, WIDTH, 20, dtype=np.float32)[0] * np.float32(-3.7),
}
EDGES = np.stack(list(EDGE_ROWS.values()))  # float32 [16, 64]
EDGE_INDEX = {name: index for index, name in enumerate(EDGE_ROWS)}
FINITE_EDGES = np.where(np.isfinite(EDGES), EDGES, np.float32(-1.25))
