import numpy as np
import pytest
from scipy import stats

from experiments.statistics import (
    by_block,
    by_quarter,
    mean_interval,
    ratio_interval,
    share_interval,
)


def test_interval_is_the_t_interval_of_the_text_means():
    blocks = np.random.default_rng(0).normal(size=(5, 8))
    found = mean_interval(blocks)
    means = blocks.mean(1)
    expected = stats.t.interval(0.95, 4, loc=means.mean(), scale=stats.sem(means))
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.mean == pytest.approx(blocks.mean())


def test_interval_covers_95_percent_when_texts_differ():
    """Blocks of a text share its effect; an interval over blocks would cover far less."""
    random = np.random.default_rng(1)
    draws = random.normal(size=(2000, 4, 1)) + 0.1 * random.normal(size=(2000, 4, 16))
    hits = [found.low < 0 < found.high for found in map(mean_interval, draws)]
    assert 0.935 < np.mean(hits) < 0.965


def test_one_text_falls_back_to_its_blocks_and_one_block_to_a_point():
    one = mean_interval(np.array([[1.0, 2.0, 3.0]]))
    assert one.low < 2.0 < one.high
    assert mean_interval(np.array([[2.0]])) == (2.0, 2.0, 2.0)


def test_blocks_and_quarters():
    positions = np.arange(16.0).reshape(2, 8)
    assert by_block(positions, 2).tolist() == [[0.5, 2.5, 4.5, 6.5], [8.5, 10.5, 12.5, 14.5]]
    assert by_quarter(positions) == [4.5, 6.5, 8.5, 10.5]


def test_a_ratio_of_pooled_means_by_hand():
    theirs = np.array([[1.0, 3.0], [4.0, 4.0]])
    ours = np.array([[0.5, 1.5], [3.0, 3.0]])
    found = ratio_interval(ours, theirs)
    # Residuals of the texts: 1 − 2r and 3 − 4r with r = 2/3, over the mean 3.
    assert found.mean == pytest.approx(2 / 3)
    half = 12.7062 * np.std([-1 / 9, 1 / 9], ddof=1) / np.sqrt(2)
    assert found.high - found.mean == pytest.approx(half, rel=1e-4)
    assert found.mean - found.low == pytest.approx(half, rel=1e-4)


def test_a_ratio_that_every_block_shares_has_no_spread():
    theirs = np.random.default_rng(0).random((4, 8))
    assert ratio_interval(0.3 * theirs, theirs) == pytest.approx((0.3, 0.3, 0.3))


def test_a_share_of_none_or_all_still_has_an_interval():
    # Wilson (1927): for 0 of n the upper end is z² / (n + z²).
    z = 1.95996
    assert share_interval(0, 10) == pytest.approx((0, 0, z**2 / (10 + z**2)), abs=1e-5)
    assert share_interval(10, 10).high == 1
