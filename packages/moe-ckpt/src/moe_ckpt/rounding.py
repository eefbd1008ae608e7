"""From the floats of a checkpoint to those of a model that is shared, in one rounding."""

import ml_dtypes
import numpy as np

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def rounded(values: np.ndarray, dtype: str) -> np.ndarray:
    """Return values in another dtype, each rounded once, to the nearest, ties to even.

    numpy goes from float64 to bfloat16 by way of float32 and rounds twice. Here the first of the
    two steps is to the odd neighbour, which leaves the second to decide as if it were the only one
    (Boldo and Melquiond, 2008).

    Examples:
        >>> just_above_a_tie = np.array([1 + 2.0**-8 + 2.0**-40])
        >>> rounded(just_above_a_tie, "bfloat16").tolist(), 1 + 2.0**-7
        ([1.0078125], 1.0078125)
        >>> just_above_a_tie.astype(ml_dtypes.bfloat16).tolist()
        [1.0]
    """
    if dtype == "bfloat16" and values.dtype == np.float64:
        values = _to_odd(values)
    with np.errstate(over="ignore"):  # beyond the largest is infinity, as rounding says
        return np.asarray(values).astype(DTYPES[dtype])


def _to_odd(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        near = values.astype(np.float32)
    beyond = np.abs(near.astype(np.float64)) > np.abs(values)
    inward = np.where(beyond, np.nextafter(near, np.float32(0)), near)
    inexact = (inward.astype(np.float64) != values) & ~np.isnan(values)
    # numpy makes scalars of arrays without axes, which a caller does not expect.
    return np.asarray(inward.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
