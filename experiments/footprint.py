"""Bytes of a cache, for any Hugging Face config.json, without allocating anything.

    python -m experiments.footprint --model=FOLDER_or_config.json_or_name --context=128k \
        [--batch=1] [--dtype=bfloat16] [--config=configs/head_to_head.py]

The rows are the grid of the config file. Sizes follow from the layout; `kvjax.nbytes` of a cache
that really is allocated gives the same number.
"""

import re
import sys
from collections.abc import Iterator
from typing import Any

import pandas as pd
from absl import app, flags
from ml_collections import ConfigDict

import kvjax
from experiments.args import config_module
from experiments.transforms import build, resolve
from kvjax.io.hf import load_config
from kvjax.io.load import SMOLLM2, smollm2_folder
from kvjax.models.config import DecoderConfig

_UNITS = {"": 1, "k": 1024, "m": 1024**2}


def token_count(text: str) -> int:
    """`"128k"` -> 131072; k and m are binary, as in the names of contexts."""
    match = re.fullmatch(r"(\d+)([km]?)", text.strip().lower())
    if not match or not int(match[1]):
        raise ValueError(f"--context={text}: write a number of tokens, such as 8192 or 128k")
    return int(match[1]) * _UNITS[match[2]]


def rows(
    config: DecoderConfig, grid: ConfigDict, base: ConfigDict, batch: int, context: int, dtype: str
) -> Iterator[dict[str, Any]]:
    """One row for each transform: its bytes, or why this model cannot have it."""
    spec = kvjax.cache_spec(config, dtype)
    exact = kvjax.footprint(spec, kvjax.cache(), batch, context).total
    elements = batch * context * 2 * len(config.layers) * config.num_kv_heads * config.head_dim
    for name in grid:
        cache = {"sink": base.sink, "tile": base.tile} | dict(grid[name].items())
        try:
            transform = build(resolve(ConfigDict(cache), f"config.grid.{name}"))
            size = kvjax.footprint(spec, transform, batch, context)
        except ValueError as error:
            yield {"cache": name, "note": str(error)}
            continue
        yield {
            "cache": name,
            "bytes": f"{size.total:,}",
            "GiB": f"{size.total / 2**30:.3f}",
            "× smaller": f"{exact / size.total:.2f}",
            "bits per element": f"{8 * size.total / elements:.3f}",
        }


def main(argv: list[str]) -> int:
    args = flags.FLAGS
    try:
        context, batch = token_count(args.context), args.batch
        config = load_config(smollm2_folder() if args.model == SMOLLM2 else args.model)
        module, arg = config_module(args.config)
        study = module.get_config(arg)
        table = pd.DataFrame(
            rows(config, study.grid, study.cache, batch, context, args.dtype)
        ).fillna("")
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    heads = f"{len(config.layers)} layers, {config.num_kv_heads} KV heads of {config.head_dim}"
    print(f"{args.model}: {heads}; {batch} × {context:,} tokens, exact entries in {args.dtype}\n")
    print(table.to_markdown(index=False, disable_numparse=True))
    return 0


if __name__ == "__main__":
    flags.DEFINE_string("model", None, "a config.json, its folder, or a name", required=True)
    flags.DEFINE_string("context", None, "tokens of a row, such as 128k", required=True)
    flags.DEFINE_integer("batch", 1, "rows", lower_bound=1)
    flags.DEFINE_enum("dtype", "bfloat16", ["bfloat16", "float16", "float32"], "of exact entries")
    flags.DEFINE_string("config", "configs/head_to_head.py", "the config file whose grid is shown")
    app.run(main)
