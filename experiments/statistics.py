"""Means with their intervals, over texts: positions of one text are not independent."""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit
from scipy.stats import binomtest


class Interval(NamedTuple):
    """A mean and its two-sided 95 % interval."""

    mean: float
    low: float
    high: float


def mean_interval(blocks: np.ndarray) -> Interval:
    """Mean and 95 % t interval of block means [texts, blocks], clustered by text.

    With two texts or more the text is the unit (equal sizes, so the cluster-robust variance is that
    of the text means, with texts - 1 degrees of freedom). With a single text the blocks are, which
    says nothing about other texts and ignores that neighbours are alike.
    """
    units = blocks.mean(axis=1) if blocks.shape[0] > 1 else blocks[0]
    mean = float(units.mean())
    if units.size < 2:
        return Interval(mean, mean, mean)
    half = stdtrit(units.size - 1, 0.975) * units.std(ddof=1) / math.sqrt(units.size)
    return Interval(mean, mean - float(half), mean + float(half))


def by_block(positions: np.ndarray, block: int) -> np.ndarray:
    """Means [texts, blocks] of per-position values [texts, T]; T is a multiple of the block."""
    return positions.reshape(positions.shape[0], -1, block).mean(axis=2)


def by_quarter(positions: np.ndarray) -> list[float]:
    """Mean of each quarter of the positions [texts, T], over all texts."""
    return [float(part.mean()) for part in np.array_split(positions, 4, axis=1)]


def ratio_interval(ours: np.ndarray, theirs: np.ndarray) -> Interval:
    """Ratio of two pooled means of paired block means [texts, blocks], with its 95 % interval.

    Clustered by text as in `mean_interval`: the delta method makes it the interval of the mean of
    (ours − ratio · theirs) / mean(theirs), whose own mean is 0.
    """
    ratio = float(ours.mean() / theirs.mean())
    spread = mean_interval((ours - ratio * theirs) / theirs.mean())
    return Interval(ratio, ratio + spread.low, ratio + spread.high)


def share_interval(count: int, n: int) -> Interval:
    """count / n with Wilson's 95 % interval, which is right near 0 and 1 too."""
    found = binomtest(count, n).proportion_ci(method="wilson")
    return Interval(count / n, float(found.low), float(found.high))
