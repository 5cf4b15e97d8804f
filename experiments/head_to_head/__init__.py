"""Ways of keeping a cache, head to head: quality while decoding on it, its bytes, its speed.

For every row of `config.grid`, all texts go through the model as one batch, `config.block` tokens a
step. A block attends to the cache as it was stored, so later blocks read what was encoded: this is
the decoding regime. Each position is compared with the exact cache's at the same position.
"""

from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from experiments.head_to_head import report
from experiments.head_to_head.rows import points, validate

__all__ = ["points", "report", "run_point", "validate"]


def run_point(config: ConfigDict, folder: Path) -> dict[str, Any]:
    """Runs one row and returns its result; JAX is imported only when there is something to run."""
    from experiments.head_to_head import evaluate

    return evaluate.run_point(config, folder)
