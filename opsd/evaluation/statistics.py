"""What the samples of an evaluation say, and how sure one can be. All in percent (points).

Shapes: P problems, G samples of each; `right_PG[p][g]` says whether sample g of problem p is right. Every problem has equally many.

Two errors, each with its question. `se_sampling`: the same problems, sampled anew. `se_clustered`: other problems like these, one
problem's samples being a cluster (arXiv 2411.00640, section 2.2). The binomial error over P x G samples answers neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb, sqrt
from statistics import fmean, variance

Flags = Sequence[Sequence[bool]]
CONFIDENCE = 0.95


def avg_at_k(right_PG: Flags) -> float:
    """The mean over problems of the mean over samples."""
    return 100 * fmean(fmean(right_G) for right_G in right_PG)


def pass_at_k(right_PG: Flags, k: int) -> float:
    """The chance that one of k samples is right, without bias: the mean over problems of 1 - C(n - c, k) / C(n, k), n samples of
    which c are right (arXiv 2107.03374, equation 1).

    Raises:
        ValueError: k is more than the samples of a problem.
    """
    for right_G in right_PG:
        if not 1 <= k <= len(right_G):
            raise ValueError(f"pass@{k} of {len(right_G)} samples: k must be from 1 to the samples of a problem.")
    return 100 * fmean(1 - comb(len(right_G) - sum(right_G), k) / comb(len(right_G), k) for right_G in right_PG)


def maj_at_k(votes_PG: Sequence[Sequence[str | None]], right_PG: Flags) -> float:
    """The chance that the most frequent answer is right. Ties are drawn: each of the most frequent answers counts equally.

    A sample without an answer (None) casts no vote; a problem without votes is wrong. An answer's own score is the share of its
    voters that are right, 0 or 1 but where the grader tells two spellings of one answer apart.
    """
    return 100 * fmean(_majority(votes_G, right_G) for votes_G, right_G in zip(votes_PG, right_PG, strict=True))


def _majority(votes_G: Sequence[str | None], right_G: Sequence[bool]) -> float:
    counts = Counter(vote for vote in votes_G if vote is not None)
    most = max(counts.values(), default=0)
    winners = [vote for vote, count in counts.items() if count == most]
    scores = [fmean(right for vote, right in zip(votes_G, right_G, strict=True) if vote == winner) for winner in winners]
    return fmean(scores) if scores else 0.0


def se_sampling(right_PG: Flags) -> float | None:
    """Standard error of avg@k over new samples of the same problems: sqrt(sum over problems of s_p^2 / G) / P, where
    s_p^2 / G = r_p (1 - r_p) / (G - 1) is unbiased and r_p the problem's share of right samples. None with one sample a problem."""
    if min(len(right_G) for right_G in right_PG) < 2:
        return None
    return 100 * sqrt(sum(fmean(right_G) * (1 - fmean(right_G)) / (len(right_G) - 1) for right_G in right_PG)) / len(right_PG)


def se_clustered(right_PG: Flags) -> float | None:
    """Standard error of avg@k over other problems of the same kind: the standard deviation of the problems' shares (P - 1 degrees
    of freedom) / sqrt(P). Sampling noise is part of it. None with one problem."""
    if len(right_PG) < 2:
        return None
    return 100 * sqrt(variance(fmean(right_G) for right_G in right_PG) / len(right_PG))


@dataclass(kw_only=True, slots=True)
class Difference:
    """How much one mean is above another, in points."""

    mean: float
    low: float  # of the 95% interval
    high: float
    p_value: float  # two-sided, of no difference

    @property
    def over(self) -> str:
        """What the interval is of, other draws of which it speaks."""
        raise NotImplementedError


@dataclass(kw_only=True, slots=True)
class PairedDifference(Difference):
    """How much the second run is above the first, problem by problem."""

    num_problems: int

    @property
    def over(self) -> str:
        return f"{self.num_problems} problems"


@dataclass(kw_only=True, slots=True)
class SeedDifference(Difference):
    """How much the second setting is above the first, training seed by training seed."""

    num_seeds: int

    @property
    def over(self) -> str:
        return f"{self.num_seeds} seeds"


def paired_difference(before_P: Sequence[float], after_P: Sequence[float]) -> PairedDifference:
    """`student` on the P differences of solve rates (shares, not percent): how sure one can be of these two sets of weights.

    The differences are means over a problem's samples and there are dozens of them, so that t is accurate; a permutation of signs
    would give a p-value of the same size and no interval.
    """
    differences_P = [100 * (after - before) for before, after in zip(before_P, after_P, strict=True)]
    mean, low, high, p_value = student(differences_P)
    return PairedDifference(mean=mean, low=low, high=high, p_value=p_value, num_problems=len(differences_P))


def seed_difference(differences_S: Sequence[float]) -> SeedDifference:
    """`student` on S training seeds: how sure one can be of what was changed, whatever the seed. All problems of a run share its
    weights, so that an interval over them would take one seed's luck for an effect.

    Args:
        differences_S: each seed's mean difference over the problems, in points; both runs have that seed.
    """
    mean, low, high, p_value = student(differences_S)
    return SeedDifference(mean=mean, low=low, high=high, p_value=p_value, num_seeds=len(differences_S))


def student(differences: Sequence[float]) -> tuple[float, float, float, float]:
    """Mean, 95% interval and p-value by Student's t, of n differences in points: one test, so that interval and p-value agree.

    Where all differences are equal there is no spread to test against: by the rule of three (n cases without an exception leave
    exceptions a share of up to 3/n, at 95%), each worth 100 points at most, the interval reaches 300 / n points to either side; p
    is 1 at zero, otherwise that of all signs agreeing by chance, 2^(1 - n).
    """
    from scipy.stats import ttest_rel

    mean = fmean(differences)
    if max(differences) - min(differences) < 1e-9:
        p_value = 1.0 if abs(mean) < 1e-9 else 2.0 ** (1 - len(differences))
        reach = 300 / len(differences)
        return mean, max(-100.0, mean - reach), min(100.0, mean + reach), p_value
    test = ttest_rel(differences, [0.0] * len(differences))
    low, high = test.confidence_interval(CONFIDENCE)
    return mean, float(low), float(high), float(test.pvalue)
