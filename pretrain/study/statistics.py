"""Statistics of a study: pairs of runs with the same seed, and scaling laws."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import optimize, stats

from pretrain.errors import UserError

CONFIDENCE = 0.95
EXPONENTS = (0.03, 0.1, 0.2, 0.3, 0.5, 0.8, 1.2)  # where the search for the best one may start


@dataclass(frozen=True)
class Paired:
    """A method against the baseline, seed by seed. `low`, `high` and `p` are None with fewer than two seeds."""

    differences: tuple[float, ...]  # method - baseline
    mean: float
    spread: float | None  # standard deviation of the differences
    low: float | None  # of the confidence interval of the mean difference
    high: float | None
    p: float | None  # two-sided, of the paired t-test

    @property
    def n(self) -> int:
        return len(self.differences)


def paired(method: list[float], baseline: list[float]) -> Paired | None:
    """Compare two lists of losses whose entries belong together; None for empty ones.

    The test is Student's, for pairs: mean difference over its standard error, n - 1 degrees of freedom.
    """
    if len(method) != len(baseline):
        raise ValueError(f"{len(method)} and {len(baseline)} values are no pairs")
    differences = tuple(a - b for a, b in zip(method, baseline, strict=True))
    if not differences:
        return None
    mean = float(np.mean(differences))
    if len(differences) == 1:
        return Paired(differences, mean, None, None, None, None)
    spread = float(np.std(differences, ddof=1))
    if spread == 0:  # the test divides by it
        return Paired(differences, mean, 0.0, mean, mean, 1.0 if mean == 0 else 0.0)
    test = stats.ttest_rel(method, baseline)
    interval = test.confidence_interval(CONFIDENCE)
    return Paired(differences, mean, spread, float(interval.low), float(interval.high), float(test.pvalue))


@dataclass(frozen=True)
class ScalingLaw:
    """L(N) = floor + scale (N / reference)^-exponent, fitted by least squares.

    Attributes:
        floor, scale, exponent: the estimates L0, a and b, with a at N = `reference`.
        reference: the geometric mean of the sizes.
        covariance: (3, 3), of (floor, scale, exponent); None with three sizes, where nothing is left to tell the error.
        degrees_of_freedom: sizes - 3.
    """

    floor: float
    scale: float
    exponent: float
    reference: float
    covariance: Any
    degrees_of_freedom: int

    def __call__(self, n: Any) -> Any:
        return _law(np.asarray(n, dtype=float) / self.reference, self.floor, self.scale, self.exponent)

    def gradient(self, n: Any) -> Any:
        """Return the derivatives of L(n) by (floor, scale, exponent), (3, len(n))."""
        return _gradient(np.asarray(n, dtype=float) / self.reference, self.floor, self.scale, self.exponent)

    def variance(self, n: Any) -> Any:
        """Return the variance of the fitted L(n), to first order in the errors of the estimates."""
        slope = self.gradient(n)
        return np.einsum("in,ij,jn->n", slope, self.covariance, slope)

    def band(self, n: Any) -> tuple[Any, Any]:
        """Return the lower and upper end of the confidence band of the law at sizes n."""
        half = quantile(self.degrees_of_freedom) * np.sqrt(self.variance(n))
        return self(n) - half, self(n) + half

    def interval(self, name: str) -> tuple[float, float]:
        """Return the confidence interval of `floor`, `scale` or `exponent`."""
        index = ("floor", "scale", "exponent").index(name)
        half = quantile(self.degrees_of_freedom) * float(np.sqrt(self.covariance[index, index]))
        return getattr(self, name) - half, getattr(self, name) + half


def fit_scaling_law(sizes: Any, losses: Any) -> ScalingLaw:
    """Fit L(N) = L0 + a N^-b to losses at sizes.

    Raises:
        UserError: fewer than three different sizes.
    """
    n, loss = np.asarray(sizes, dtype=float), np.asarray(losses, dtype=float)
    if len(set(n.tolist())) < 3:
        raise UserError(f"a scaling law has three parameters, and there are {len(set(n.tolist()))} sizes")
    reference = float(np.exp(np.log(n).mean()))
    x = n / reference
    start = min((_line(x, loss, exponent) for exponent in EXPONENTS), key=lambda line: line[0])[1]
    best = optimize.least_squares(
        lambda p: _law(x, *p) - loss, start, lambda p: _gradient(x, *p).T, x_scale="jac", xtol=1e-12, ftol=1e-12
    )
    free = len(n) - 3
    covariance = None
    if free > 0:
        covariance = np.linalg.pinv(best.jac.T @ best.jac) * (2 * best.cost / free)
    floor, scale, exponent = map(float, best.x)
    return ScalingLaw(floor, scale, exponent, reference, covariance, free)


def _line(x: Any, loss: Any, exponent: float) -> tuple[float, list[float]]:
    """Return the squared error, and (floor, scale, exponent), of the best law with a given exponent: a line's."""
    power = x**-exponent
    scale = np.cov(power, loss, bias=True)[0, 1] / power.var()
    floor = loss.mean() - scale * power.mean()
    return float(np.square(_law(x, floor, scale, exponent) - loss).sum()), [floor, scale, exponent]


def _law(x: Any, floor: float, scale: float, exponent: float) -> Any:
    return floor + scale * x**-exponent


def _gradient(x: Any, floor: float, scale: float, exponent: float) -> Any:
    power = x**-exponent
    return np.stack([np.ones_like(x), power, -scale * power * np.log(x)])


def log_ratio(baseline: ScalingLaw, method: ScalingLaw, n: Any) -> tuple[Any, Any]:
    """Return log(L_baseline / L_method) at sizes n by the fitted laws, and its standard error (None without errors)."""
    value = np.log(baseline(n) / method(n))
    if baseline.covariance is None or method.covariance is None:
        return value, None
    return value, np.sqrt(baseline.variance(n) / baseline(n) ** 2 + method.variance(n) / method(n) ** 2)


def quantile(degrees_of_freedom: int) -> float:
    """Return the t quantile of a two-sided interval."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees_of_freedom))
