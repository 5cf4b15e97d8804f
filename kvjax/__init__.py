"""kvjax: smaller key-value caches for language models, in JAX and Flax.

model, tokenizer = kvjax.load("smollm2-135m")
transform = kvjax.cache(encode=kvjax.encode.kvarn(key_bits=2, value_bits=2), sink=128)
out = kvjax.generate(model, [tokenizer.encode("The capital of France is")], transform)
"""

from kvjax import encode, place, select
from kvjax.cache import CacheTransform, footprint, merge, nbytes, per_layer
from kvjax.cache.transform import cache
from kvjax.io.load import load, save
from kvjax.models.decoder import Decoder, cache_spec, finish, forward, init_cache, probe, step
from kvjax.models.generate import generate, prefill

__version__ = "0.1.0"

__all__ = [
    "CacheTransform",
    "Decoder",
    "cache",
    "cache_spec",
    "encode",
    "finish",
    "footprint",
    "forward",
    "generate",
    "init_cache",
    "load",
    "merge",
    "nbytes",
    "per_layer",
    "place",
    "prefill",
    "probe",
    "save",
    "select",
    "step",
]
