"""What a study concludes from its numbers, against closed forms and planted truths."""

import math

import numpy as np
import pytest
from scipy import stats

from pretrain.errors import UserError
from pretrain.study.statistics import fit_scaling_law, log_ratio, paired

SIZES = np.geomspace(1e8, 2e9, 8)
FLOOR, SCALE, EXPONENT = 1.8, 900.0, 0.38


def truth(n):
    return FLOOR + SCALE * n**-EXPONENT


def test_the_paired_test_is_student_s():
    random = np.random.default_rng(0)
    baseline = random.normal(3, 0.1, 6)
    method = baseline + random.normal(-0.02, 0.01, 6)
    found = paired(method.tolist(), baseline.tolist())
    assert found is not None
    differences = method - baseline
    error = differences.std(ddof=1) / math.sqrt(6)
    assert found.mean == pytest.approx(differences.mean())
    assert found.p == pytest.approx(2 * stats.t.sf(abs(differences.mean() / error), df=5))
    assert found.p == pytest.approx(stats.ttest_rel(method, baseline).pvalue)
    assert (found.low, found.high) == pytest.approx(stats.t.interval(0.95, 5, differences.mean(), error))


def test_one_pair_has_no_spread_and_none_no_mean():
    assert paired([], []) is None
    one = paired([2.5], [3.0])
    assert one is not None
    assert (one.n, one.mean, one.spread, one.p) == (1, -0.5, None, None)


def test_equal_differences_are_no_chance():
    same = paired([1.0, 2.0], [1.0, 2.0])
    assert same is not None
    assert (same.mean, same.p) == (0.0, 1.0)


def test_a_scaling_law_without_noise_is_found_exactly():
    law = fit_scaling_law(SIZES, truth(SIZES))
    assert law.floor == pytest.approx(FLOOR, rel=1e-5)
    assert law.exponent == pytest.approx(EXPONENT, rel=1e-5)
    assert law.scale * law.reference**law.exponent == pytest.approx(SCALE, rel=1e-3)
    np.testing.assert_allclose(law(4e9), truth(4e9), rtol=1e-6)


def test_the_confidence_intervals_hold_the_truth_as_often_as_they_say():
    random = np.random.default_rng(1)
    hits = {"floor": 0, "exponent": 0, "band": 0}
    repetitions = 300
    for _ in range(repetitions):
        law = fit_scaling_law(SIZES, truth(SIZES) + random.normal(0, 0.002, len(SIZES)))
        for name, value in (("floor", FLOOR), ("exponent", EXPONENT)):
            low, high = law.interval(name)
            hits[name] += low <= value <= high
        low, high = law.band(np.array([5e8]))
        hits["band"] += bool(low[0] <= truth(5e8) <= high[0])
    for name, number in hits.items():
        assert 0.91 <= number / repetitions <= 0.985, name


def test_the_log_ratio_is_that_of_the_two_laws_with_the_error_of_both():
    random = np.random.default_rng(2)
    baseline = fit_scaling_law(SIZES, truth(SIZES) + random.normal(0, 0.002, 8))
    method = fit_scaling_law(SIZES, 0.99 * truth(SIZES) + random.normal(0, 0.002, 8))
    value, error = log_ratio(baseline, method, SIZES)
    np.testing.assert_allclose(value, np.log(baseline(SIZES)) - np.log(method(SIZES)))
    # Against the spread of the same thing over many draws of the noise.
    draws = [
        log_ratio(
            fit_scaling_law(SIZES, truth(SIZES) + random.normal(0, 0.002, 8)),
            fit_scaling_law(SIZES, 0.99 * truth(SIZES) + random.normal(0, 0.002, 8)),
            SIZES,
        )
        for _ in range(150)
    ]
    spread = np.std([draw for draw, _ in draws], axis=0)
    typical = np.sqrt(np.mean([e**2 for _, e in draws], axis=0))
    np.testing.assert_allclose(typical, spread, rtol=0.25)
    assert error.shape == SIZES.shape


def test_three_sizes_give_a_law_without_errors_and_two_none():
    law = fit_scaling_law(SIZES[:3], truth(SIZES[:3]))
    assert law.covariance is None
    assert log_ratio(law, law, SIZES)[1] is None
    with pytest.raises(UserError, match="there are 2 sizes"):
        fit_scaling_law(SIZES[:2], truth(SIZES[:2]))
