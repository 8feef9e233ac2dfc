"""Fit the rational function by which the native kernels compute gelu, and print its coefficients.

    python -m scripts.make.gelu

The normal distribution function is 1/2 + x R(x²), and R is fitted by P / Q, both of degree 5 in x², on 0 < x <= 5.6:
beyond, it is 0 or 1 in float32.  The relative error is made even by weighted least squares, repeated with the weights
of large errors raised (Lawson's method) and with Q of the last round as divisor, which makes the problem linear
(Sanathanan and Koerner).  kernels/functions.h holds what this prints.
"""

import argparse
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BOUND = 5.6
DEGREE = 5
ROUNDS = 200

Array = NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    error, upper, lower = fit()
    print(f"relative error {error:.1e}")
    for name, coefficients in (("P", upper), ("Q", lower)):
        print(name, ", ".join(str(float(np.float32(each))) for each in coefficients[::-1]), "from the highest power")
    return 0


def fit() -> tuple[float, Array, Array]:
    """Return the largest relative error, and the coefficients of P and Q from the lowest power."""
    from scipy.special import erf

    middle = (np.cos(np.linspace(0, np.pi, 6001)) / 2 + 0.5) * BOUND**2
    z = np.unique(np.clip(np.concatenate([middle, np.linspace(1e-6, BOUND, 3000) ** 2]), 1e-9, None))
    x = np.sqrt(z)
    wanted = 0.5 * erf(x / np.sqrt(2)) / x
    powers = (z / BOUND**2)[:, None] ** np.arange(DEGREE + 1)
    weights, divisor = np.ones_like(z), np.ones_like(z)
    best = np.inf, np.empty(0)
    for _ in range(ROUNDS):
        scale = np.sqrt(weights) / wanted / divisor
        columns = np.concatenate([powers, -wanted[:, None] * powers[:, 1:]], 1)
        found = np.linalg.lstsq(columns * scale[:, None], wanted * scale, rcond=None)[0]
        divisor = 1 + powers[:, 1:] @ found[DEGREE + 1 :]
        errors = np.abs(powers @ found[: DEGREE + 1] / divisor - wanted) / wanted
        best = min(best, (float(errors.max()), found), key=lambda pair: pair[0])
        weights *= (errors / errors.mean() + 1e-3) ** 0.5
        weights /= weights.mean()
    error, found = best
    shrink = BOUND ** (-2.0 * np.arange(DEGREE + 1))
    return error, found[: DEGREE + 1] * shrink, np.concatenate([[1], found[DEGREE + 1 :]]) * shrink


if __name__ == "__main__":
    raise SystemExit(main())
