"""A fixed-size memory beside a frozen model: δ-mem (arXiv 2605.12357).

model = memory.attach(model, *memory.load_adapter(folder))     # or (model, DeltaMemConfig())
cache = kvjax.init_cache(model, transform, batch, capacity)    # with empty memories
logits, cache = kvjax.step(model, tokens, cache)               # reads and writes
"""

from kvjax.memory.attach import (
    attach,
    detach,
    gate_means,
    memory_config,
    parameter_count,
    states,
    tensors,
    with_states,
    writing,
)
from kvjax.memory.config import DeltaMemConfig
from kvjax.memory.files import load_adapter, load_state, save_adapter, save_state
from kvjax.memory.module import MemoryParam, MemoryState

__all__ = [
    "DeltaMemConfig",
    "MemoryParam",
    "MemoryState",
    "attach",
    "detach",
    "gate_means",
    "load_adapter",
    "load_state",
    "memory_config",
    "parameter_count",
    "save_adapter",
    "save_state",
    "states",
    "tensors",
    "with_states",
    "writing",
]
