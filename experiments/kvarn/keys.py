"""How wrong the stored tokens are, and how: in length or in direction.

‖k − k̂‖² = (‖k‖ − ‖k̂‖)² + 2 ‖k‖ ‖k̂‖ (1 − cos(k, k̂)): a part by magnitude and a part by direction
(KVarN, arXiv 2606.03458, section on error accumulation).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.statistics import mean_interval
from kvjax.cache.segments import Chunk, LayerCache

TOP = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # shares of the tokens, the worst first


class TokenErrors(NamedTuple):
    """Squared errors of tokens: `total`, its part by `magnitude`, and the token's squared `size`.

    [B, K, C] of one tile; [L, B, K, tokens] of a run.
    """

    total: Any
    magnitude: Any
    size: Any


def of_tile(layer: LayerCache, chunk: Chunk) -> dict[str, TokenErrors]:
    """Errors of the tile that `chunk` has just become, by stream, as read back from the cache."""
    here, encoder = layer.layout, layer.plan.encode
    assert encoder is not None
    slot = (chunk.start[0] - here.sink) // here.tile % here.tiles
    found = {}
    for stream in layer.spec.streams:
        leaves = {
            name: lax.dynamic_index_in_dim(leaf, slot, 2, keepdims=False)
            for name, leaf in layer.body[stream.name].items()
        }
        stored = encoder.decode_tile(leaves, stream.encode_role, stream.dim)
        stored = encoder.unrotate(stored, stream.encode_role)
        found[stream.name] = token_errors(chunk.entries[stream.name].astype(jnp.float32), stored)
    return found


def token_errors(exact: Array, stored: Array) -> TokenErrors:
    """Of vectors [B, K, C, D]."""
    size, ours = (jnp.sqrt(jnp.square(x).sum(-1)) for x in (exact, stored))
    total = jnp.square(exact - stored).sum(-1)
    return TokenErrors(total, jnp.square(size - ours), jnp.square(size))


def stacked(layers: Sequence[dict[str, TokenErrors]]) -> dict[str, TokenErrors]:
    """Layers [B, K, C] as [L, B, K, C]."""
    return jax.tree.map(lambda *xs: np.stack(xs), *layers)


def gather(tiles: Sequence[dict[str, TokenErrors]]) -> dict[str, TokenErrors]:
    """Tiles [L, B, K, C] one after another as [L, B, K, tokens], in double precision."""
    return jax.tree.map(lambda *xs: np.concatenate(xs, -1, dtype=np.float64), *tiles)


def split(errors: TokenErrors) -> dict[str, Any]:
    """What of the error is magnitude's, over the worst tokens of each layer, head and text.

    Shares are taken within a layer, head and text, then averaged, so that no layer with long keys
    speaks for all; intervals are over texts.
    """
    order = np.argsort(-errors.total, axis=-1)
    total, magnitude = (np.take_along_axis(x, order, -1) for x in errors[:2])
    rows = []
    for share in TOP:
        count = max(1, round(share * total.shape[-1]))
        worst, worst_magnitude = total[..., :count].sum(-1), magnitude[..., :count].sum(-1)
        rows.append({
            "top": share,
            "tokens": count,
            "magnitude": _over_texts(worst_magnitude / worst),
            "of_all_error": _over_texts(worst / total.sum(-1)),
        })  # fmt: skip
    relative = np.sqrt(errors.total.sum(-1) / errors.size.sum(-1))
    return {"relative": _over_texts(relative), "worst": rows}


def _over_texts(x: np.ndarray) -> dict[str, float]:
    """The mean of [L, B, K] over layers and heads, with its interval over texts."""
    return mean_interval(x.mean((0, 2))[:, None])._asdict()
