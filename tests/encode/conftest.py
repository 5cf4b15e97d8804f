"""Reference data of the quantizers, and one small key and value stream that every test may use."""

from functools import cached_property
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

FOLDER = Path(__file__).parents[1] / "golden" / "quant"


class Golden:
    """The files of tests/golden/quant; see its README for what each tensor is."""

    @cached_property
    def rotated(self):
        return load_file(FOLDER / "rotated.safetensors")

    @cached_property
    def kvarn(self):
        return load_file(FOLDER / "kvarn.safetensors")

    @cached_property
    def quarot(self):
        return load_file(FOLDER / "quarot.safetensors")

    @cached_property
    def int8(self):
        return load_file(FOLDER / "int8.safetensors")

    def tiles(self, dim, kind, role, tile):
        """Rotated input as float32 [K * T / tile, tile, dim]."""
        return (
            self.rotated[f"d{dim}/{kind}/{role[0]}_rot"].astype(np.float32).reshape(-1, tile, dim)
        )

    @staticmethod
    def codes(packed, bits):
        """uint8 [..., n * bits / 8] to codes [..., n]."""
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        return ((packed[..., None] >> shifts) & (2**bits - 1)).reshape(*packed.shape[:-1], -1)

    def attention(self, dim, kind, key, value):
        """softmax(q K^T / sqrt(D)) V in float64 over decoded tiles [K * N, C, D] of head dim D.

        ``key`` and ``value`` are in the rotated frame. Returns [H, D] in the original one.
        """
        hadamard = np.ones((1, 1))
        while len(hadamard) < dim:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        hadamard = hadamard / np.sqrt(dim)
        query = self.rotated[f"d{dim}/{kind}/q"][0].astype(np.float64)
        heads = len(query) // 4
        query = (query @ hadamard).reshape(heads, 4, dim)
        key = np.asarray(key, np.float64).reshape(heads, -1, dim)
        value = np.asarray(value, np.float64).reshape(heads, -1, dim)
        scores = query @ key.swapaxes(-1, -2) / np.sqrt(dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return (weights @ value @ hadamard).reshape(-1, dim)


@pytest.fixture(scope="session")
def golden():
    return Golden()


@pytest.fixture(scope="session")
def stream():
    """Keys and values [B=2, S=128, K=2, D=64], drawn apart, with outlier channels and tokens."""
    key_seed, value_seed = jax.random.split(jax.random.key(0))
    k = jax.random.normal(key_seed, (2, 128, 2, 64)).at[..., 5].mul(10.0)
    v = jax.random.normal(value_seed, (2, 128, 2, 64)).at[:, 3].mul(8.0)
    return jnp.asarray(k), jnp.asarray(v)
