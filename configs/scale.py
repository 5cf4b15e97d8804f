"""The 0.6B + 4B soft-token model at its true size: bytes a chip, from compiled programs alone.

    pip install -c constraints.txt libtpu
    .venv/bin/python scripts/aot_scale.py --workdir=DIR [--config.rows="('v5e:2x2',)"]

which is `python -m experiments.launch --config=configs/scale.py` on a machine without a TPU.
Inference: for each slice and method the peak bytes of a chip against the context, batch 1.
Training: the end-to-end step of `configs/lclm.py:paper` on slices of rising size, so that the first
that holds it is seen. Nothing runs, so nothing here is a time; the compiler's memory is.

Expect, on four chips: the exact cache takes 2.2 GiB of each at 4K, 11.1 at 256K and 38.9 at 1M, so
v5e holds 256K, v6e 512K and v5p all of it; KVarN 7.4 at 1M; the compressor 4.3 for its encoder at
any context, and at 1M 12.3, 7.7 and 5.4 by ratio 4, 8 and 16, 4.3 where ratio 8 meets KVarN. The
training step fits from 16 chips of v5e, 8 of v6e and 4 of v5p on. `results/scale` holds it all.

In CPU seconds: an encoder pass 45, an exact decoder of 36 layers 35 a context, one with KVarN 75; a
program that was compiled once is kept under DIR/programs.
"""

from typing import Any

from ml_collections import ConfigDict

from configs.lclm import get_config as lclm
from experiments.args import parse_arg

K = 1024


def get_config(arg: str = "") -> ConfigDict:
    """`""` all of it; `"inference"` or `"training"` one half."""
    variant = parse_arg(arg, inference=False, training=False)
    config = ConfigDict()
    config.experiment = "scale"
    config.parts = tuple(p for p in ("inference", "training") if variant[p]) or (
        "inference",
        "training",
    )
    config.rows = ()  # slices to compile for; none: those below
    config.inference = ConfigDict(
        {
            "slices": ("v5e:2x2", "v6e:2x2", "v5p:2x2x1"),
            "contexts": (4 * K, 64 * K, 256 * K, 512 * K, 1024 * K),
            "chunk": 512,  # tokens of a prefill chunk
            "windows": 128,  # encoder windows a pass
            "least": 1024,  # places of the decoder's cache, however short the soft tokens are
            "methods": _methods(),
        }
    )
    recipe = lclm("paper")
    config.training = ConfigDict(
        {
            "slices": ("v5e:2x4", "v5e:4x4", "v5e:4x8", "v6e:2x2", "v6e:2x4", "v5p:2x2x1"),
            "ratio": recipe.arms[recipe.rows[0]].ratios[0],
            "rows": recipe.shape.rows * recipe.shape.micro,  # packed rows a step
            "rows_a_chip": 1,  # of a micro-batch
            "recipe": recipe,
        }
    )  # fmt: skip
    return config


def _methods() -> dict[str, Any]:
    """`ratio` 1: no compressor; `encode`: how the decoder's cache is stored."""
    kvarn = {"encode": "kvarn", "sink": 128}
    exact = {"encode": "none", "sink": 0}
    methods: dict[str, Any] = {"exact": {"ratio": 1, **exact}, "kvarn-2bit": {"ratio": 1, **kvarn}}
    methods |= {f"lclm-{n}": {"ratio": n, **exact} for n in (4, 8, 16)}
    return methods | {"lclm-8-kvarn-2bit": {"ratio": 8, **kvarn}}
