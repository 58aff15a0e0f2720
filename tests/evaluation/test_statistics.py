"""Scores and errors against numbers worked by hand, exact enumeration and simulation."""

from __future__ import annotations

from itertools import combinations
from math import sqrt

import numpy as np
import pytest

from opsd.evaluation.statistics import (
    avg_at_k,
    maj_at_k,
    paired_difference,
    pass_at_k,
    se_clustered,
    se_sampling,
    seed_difference,
)

T, F = True, False
HAND = [[T, T, F, F], [T, F, F, F], [F, F, F, F]]  # shares 1/2, 1/4, 0


def test_scores_by_hand():
    assert avg_at_k(HAND) == pytest.approx(25)
    assert pass_at_k(HAND, 1) == pytest.approx(25)
    assert pass_at_k(HAND, 2) == pytest.approx(100 * (5 / 6 + 1 / 2 + 0) / 3)
    assert pass_at_k(HAND, 4) == pytest.approx(200 / 3)
    assert se_sampling(HAND) == pytest.approx(100 * sqrt((0.25 + 0.1875) / 3) / 3)
    assert se_clustered(HAND) == pytest.approx(100 * sqrt(0.0625 / 3))


def test_pass_at_k_is_the_mean_over_all_choices_of_k():
    right_G = [T, F, F, T, F, F, F]
    for k in range(1, 8):
        drawn = [any(chosen) for chosen in combinations(right_G, k)]
        assert pass_at_k([right_G], k) == pytest.approx(100 * sum(drawn) / len(drawn))
    with pytest.raises(ValueError, match="pass@8 of 7 samples"):
        pass_at_k([right_G], 8)


@pytest.mark.parametrize(
    ("votes", "right", "score"),
    [
        (["7", "7", "8", None], [T, T, F, F], 100),
        (["7", "8", "8", None], [T, F, F, F], 0),
        (["7", "7", "8", "8"], [T, T, F, F], 50),
        (["7", "8", "9", None], [T, F, F, F], 100 / 3),
        ([None, None, None, "7"], [F, F, F, T], 100),  # samples without an answer do not outvote
        ([None, None, None, None], [F, F, F, F], 0),
        (["7", "7", "8", "8"], [T, F, F, F], 25),  # two spellings of 7 of which the grader takes one
    ],
)
def test_majority(votes, right, score):
    assert maj_at_k([votes], [right]) == pytest.approx(score)
    assert maj_at_k([votes, ["1"] * 4], [right, [T] * 4]) == pytest.approx((score + 100) / 2)


def test_errors_that_need_more_than_one():
    assert se_sampling([[T], [F]]) is None
    assert se_clustered([[T, F, T]]) is None
    assert se_sampling([[T, F, T]]) == pytest.approx(100 * sqrt(2 / 9 / 2))


def aime_like(rng: np.random.Generator) -> np.ndarray:
    """Chances of 30 problems to be solved: a third easy, a third hard, the rest between."""
    return np.concatenate([rng.beta(12, 1.2, 10), rng.beta(1.2, 12, 10), rng.beta(1.5, 1.5, 10)])


def test_errors_match_the_spread_of_repeated_evaluations():
    rng = np.random.default_rng(0)
    chances_P = aime_like(rng)
    scores, squared = [], []
    for _ in range(3000):
        right_PG = (rng.random((30, 12)) < chances_P[:, None]).tolist()
        scores.append(avg_at_k(right_PG))
        squared.append(se_sampling(right_PG) ** 2)
    assert np.mean(squared) == pytest.approx(np.var(scores), rel=0.08)
    scores, squared = [], []
    for _ in range(3000):
        right_PG = (rng.random((30, 12)) < rng.choice(chances_P, 30)[:, None]).tolist()
        scores.append(avg_at_k(right_PG))
        squared.append(se_clustered(right_PG) ** 2)
    assert np.mean(squared) == pytest.approx(np.var(scores), rel=0.08)


def test_paired_difference_by_hand():
    # differences 10, 20, 30 points: mean 20, s = 10, standard error 10 / sqrt(3), t = 3.4641 with 2 degrees of freedom
    result = paired_difference([0.1, 0.2, 0.3], [0.2, 0.4, 0.6])
    assert result.mean == pytest.approx(20)
    assert (result.low, result.high) == pytest.approx(
        (20 - 4.302652729911275 * 10 / sqrt(3), 20 + 4.302652729911275 * 10 / sqrt(3))
    )
    t = 2 * sqrt(3)
    assert result.p_value == pytest.approx(1 - t / sqrt(t * t + 2))  # Student's t with 2 degrees of freedom in closed form
    assert result.num_problems == 3


def test_paired_difference_without_spread():
    same = paired_difference([0.5, 0.25, 0.0], [0.5, 0.25, 0.0])
    assert (same.mean, same.low, same.high, same.p_value) == (0, -100, 100, 1)
    many = paired_difference([0.5] * 60, [0.5] * 60)
    assert (many.mean, many.low, many.high, many.p_value) == (0, -5, 5, 1)
    shifted = paired_difference([0.1, 0.2, 0.3], [0.6, 0.7, 0.8])
    assert (shifted.mean, shifted.low, shifted.high) == pytest.approx((50, -50, 100))
    assert shifted.p_value == 0.25  # three signs agree by chance one time in four
    alone = paired_difference([0.5], [0.75])
    assert (alone.mean, alone.low, alone.high, alone.p_value) == (25, -100, 100, 1)


def test_seed_difference_by_hand():
    # -2, 1, 4 points: mean 1, s = 3, standard error sqrt(3), t = 1 / sqrt(3) with 2 degrees of freedom
    result = seed_difference([-2.0, 1.0, 4.0])
    assert (result.mean, result.low, result.high) == pytest.approx(
        (1, 1 - 4.302652729911275 * sqrt(3), 1 + 4.302652729911275 * sqrt(3))
    )
    assert result.p_value == pytest.approx(1 - (1 / sqrt(3)) / sqrt(1 / 3 + 2))
    assert (result.num_seeds, result.over) == (3, "3 seeds")
    assert (seed_difference([0.0] * 3).low, seed_difference([0.0] * 3).high) == (-100, 100)


def test_the_seeds_interval_covers_what_the_problems_does_not():
    """Weights differ by their seed (here by 5 points for all problems of a run): over problems a difference of nothing is found far
    too often, over seeds as seldom as promised."""
    rng = np.random.default_rng(2)
    covered_seeds = covered_problems = 0
    for _ in range(600):
        chances = rng.beta(2, 2, 60)
        runs = [[chances + rng.normal(0, 0.05) for _ in range(2)] for _ in range(3)]
        pairs = [[(rng.random((60, 12)) < each[:, None]).mean(1).tolist() for each in run] for run in runs]
        over_problems = [paired_difference(*pair) for pair in pairs]
        over_seeds = seed_difference([each.mean for each in over_problems])
        covered_seeds += over_seeds.low <= 0 <= over_seeds.high
        covered_problems += over_problems[0].low <= 0 <= over_problems[0].high
    assert 0.92 < covered_seeds / 600 < 0.98
    assert covered_problems / 600 < 0.6


def test_paired_difference_covers_and_rejects_as_promised():
    rng = np.random.default_rng(1)
    differences, covered, rejected = [], 0, 0
    for _ in range(1200):
        chances_P = aime_like(rng)
        before_P, after_P = ((rng.random((30, 12)) < chances_P[:, None]).mean(1).tolist() for _ in range(2))
        result = paired_difference(before_P, after_P)
        differences.append(result.mean)
        covered += result.low <= 0 <= result.high
        rejected += result.p_value < 0.05
    assert covered + rejected == 1200  # interval and p-value are one test
    assert 0.035 < rejected / 1200 < 0.065
    assert 2.2 < np.std(differences) < 2.9  # points, two evaluations of equal weights
