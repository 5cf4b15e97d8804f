import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.ops import hadamard


def sylvester(dim):
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(dim)


@pytest.mark.parametrize("dim", [2, 8, 64, 128])
def test_matrix_is_sylvesters_and_its_own_inverse(dim):
    matrix = np.asarray(hadamard.hadamard_matrix(dim))
    assert matrix.dtype == np.float32
    np.testing.assert_allclose(matrix, sylvester(dim), rtol=1e-7)
    np.testing.assert_allclose(matrix @ matrix, np.eye(dim), atol=1e-6)


def test_rotation_spreads_an_outlier_channel_and_comes_back():
    x = jnp.zeros((3, 64)).at[:, 7].set(80.0)
    rotated = hadamard.rotate(x)
    np.testing.assert_allclose(jnp.abs(rotated), 10.0, rtol=1e-6)
    np.testing.assert_allclose(hadamard.rotate(rotated), x, atol=1e-4)


def test_scores_and_outputs_survive_the_rotation():
    rng = np.random.default_rng(0)
    query, key = rng.normal(size=(2, 5, 64)).astype(np.float32)
    scores = hadamard.rotate(jnp.asarray(query)) @ hadamard.rotate(jnp.asarray(key)).T
    np.testing.assert_allclose(scores, query @ key.T, rtol=1e-4, atol=1e-4)


def test_bfloat16_is_rotated_in_float32():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 64)), jnp.bfloat16)
    rotated = hadamard.rotate(x)
    assert rotated.dtype == jnp.float32
    np.testing.assert_allclose(rotated, x.astype(np.float32) @ sylvester(64), atol=1e-5)


@pytest.mark.parametrize("dim", [1, 3, 20, 80, 96])
def test_other_head_dims_raise(dim):
    with pytest.raises(ValueError, match=f"head_dim={dim} .* rtn or int8"):
        hadamard.rotate(jnp.zeros((2, dim)))
