import numpy as np
import pytest

from kvjax.encode import codebook
from tests.encode.contract import peers


@pytest.mark.parametrize("bits", codebook.WIDTHS)
def test_centroids_are_those_of_the_reference(bits):
    """At 4 bits the reference stops its iteration some 6e-4 early."""
    wanted = peers()[f"d64/tq/centroids_b{bits}"] * 8  # stored for N(0, 1/64)
    tolerance = 1e-3 if bits == 4 else 1e-6
    np.testing.assert_allclose(codebook.lloyd_max(bits), wanted, atol=tolerance)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03455), (4, 0.0095)])
def test_the_error_is_the_known_one(bits, error):
    """Max 1960, table 1: the mean square error of the best 2^b levels for N(0, 1)."""
    x = np.linspace(-8, 8, 100_001)
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
    nearest = np.asarray(
        codebook.look_up(codebook.nearest(x, codebook.lloyd_max(bits)), codebook.lloyd_max(bits))
    )
    assert ((nearest - x) ** 2 * density).sum() == pytest.approx(error, rel=2e-3)


def test_nearest_and_look_up_agree_with_a_search():
    centroids = codebook.lloyd_max(3)
    x = np.random.default_rng(0).normal(size=500).astype(np.float32)
    index = np.asarray(codebook.nearest(x, centroids))
    distance = np.abs(x[:, None] - np.float32(centroids))
    np.testing.assert_array_equal(index, distance.argmin(axis=1))
    np.testing.assert_array_equal(codebook.look_up(index, centroids), np.float32(centroids)[index])


def test_other_widths_raise_with_a_remedy():
    with pytest.raises(ValueError, match="key_bits=5 has no codebook: choose one of.*or rtn"):
        codebook.check_bits("key_bits", 5)
    with pytest.raises(ValueError, match="bits=0 has no codebook"):
        codebook.lloyd_max(0)
