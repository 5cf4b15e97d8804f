import numpy as np
import pytest
from scipy import stats

from experiments.statistics import by_block, by_quarter, mean_interval


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
