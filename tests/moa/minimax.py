"""Finds the quotient of polynomials with the least largest error, by reweighted least squares, in float64."""

import numpy as np

Array = np.ndarray


def least_error(target: Array, scale: Array, above: Array, below: Array, rounds: int = 100) -> float:
    """The least max |q - target| / scale over points, for q = (above @ a) / (1 + below @ b), over all a and b.

    Lawson's iteration: where the error is large, the weight grows. The denominator of the round before makes each
    round a linear problem.

    Args:
        target, scale: (points,)
        above, below: (points, coefficients), the latter perhaps of no columns.
    """
    weight, denominator, least = np.ones_like(target), np.ones_like(target), np.inf
    for _ in range(rounds):
        factor = np.sqrt(weight) / np.abs(denominator) / scale
        columns = np.concatenate([above, -below * target[:, None]], axis=1) * factor[:, None]
        norms = np.linalg.norm(columns, axis=0)
        coefficients = np.linalg.lstsq(columns / norms, target * factor, rcond=None)[0] / norms
        a, b = np.split(coefficients, [above.shape[1]])
        denominator = 1 + below @ b
        error = np.abs(above @ a / denominator - target) / scale
        least = min(least, error.max())
        weight *= (error / error.max()) ** 0.6 + 1e-9
        weight /= weight.mean()
    return float(least)
