"""The cache contract: what is kept of each token, how it is read, and where tokens enter.

Read in this order: `spec` (streams, layers), `layout` (the four choices for a layer), `segments`
(the arrays), `partials` (out and lse, and how they merge), `attend`, `append`, `transform`,
`bytes`.
"""

from kvjax.cache.append import append
from kvjax.cache.attend import attend
from kvjax.cache.bytes import Bytes, footprint, nbytes
from kvjax.cache.layout import Layout, Plan, layout
from kvjax.cache.segments import Chunk, LayerCache, ModelCache
from kvjax.cache.spec import CacheSpec, LayerSpec, StreamSpec, heads_spec
from kvjax.cache.transform import CacheTransform, cache, per_layer
from kvjax.ops.partials import Partial, merge

__all__ = [
    "Bytes",
    "CacheSpec",
    "CacheTransform",
    "Chunk",
    "Layout",
    "LayerCache",
    "LayerSpec",
    "ModelCache",
    "Partial",
    "Plan",
    "StreamSpec",
    "append",
    "attend",
    "cache",
    "footprint",
    "heads_spec",
    "layout",
    "merge",
    "nbytes",
    "per_layer",
]
