"""kvjax's side of decode.py; the side's name is the cache, exact, int8, kvarn or kvarn4 (4 bits).

Encoded caches keep 128 tokens exact at the front and encode tiles of 128. `memory` is the exact
cache and a delta-mem of the paper's settings beside the model, untrained.
"""

import os

import numpy as np
import worker

os.environ.setdefault("JAX_PLATFORMS", "cpu")
point = worker.parse()
worker.use_threads(point.threads)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from flax import nnx  # noqa: E402

import kvjax  # noqa: E402
from kvjax import memory  # noqa: E402
from kvjax.models.generate import STRETCH, decode_stretch, prefill  # noqa: E402

TRANSFORMS = {
    "exact": lambda: kvjax.cache(),
    "int8": lambda: kvjax.cache(encode=kvjax.encode.int8(tile=128), sink=128),
    "kvarn": lambda: kvjax.cache(
        encode=kvjax.encode.kvarn(key_bits=2, value_bits=2, tile=128), sink=128
    ),
    "kvarn4": lambda: kvjax.cache(
        encode=kvjax.encode.kvarn(key_bits=4, value_bits=4, tile=128), sink=128
    ),
    "memory": lambda: kvjax.cache(),
}


class Ours:
    def load(self) -> None:
        self.model, _ = kvjax.load(point.folder, dtype="float32")
        if point.side == "memory":
            self.model = memory.attach(self.model, memory.DeltaMemConfig())
        self.transform = TRANSFORMS[point.side]()
        self.parts = nnx.split(self.model)
        self.tokens = point.tokens(self.model.config.vocab_size)
        self.cache = None
        jax.block_until_ready(self.parts[1])

    def prefill(self, count: int) -> None:
        self.cache = None  # the old one goes before the new one comes
        cache = kvjax.init_cache(self.model, self.transform, point.batch, point.capacity)
        found = prefill(self.model, self.tokens[:, :count], cache, donate=True)
        self.logits, self.cache = jax.block_until_ready(found)
        self.key, self.done = jax.random.key(0), jnp.zeros(point.batch, bool)

    def decode(self, steps: int) -> np.ndarray:
        found = []
        for at in range(0, steps, STRETCH):
            limit = min(STRETCH, steps - at)
            tokens, self.cache, self.logits, self.key, self.done = decode_stretch(
                *self.parts, self.cache, self.logits, self.key, self.done, jnp.int32(limit)
            )
            found.append(np.asarray(tokens)[:, :limit])
        return np.concatenate(found, 1)


ours = Ours()
worker.serve(worker.Side(ours.load, ours.prefill, ours.decode), point)
