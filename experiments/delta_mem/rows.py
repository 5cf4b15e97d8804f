"""From a config to its points, and everything about a config that can be wrong beforehand."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ml_collections import ConfigDict

from experiments.compressor import check_compressor
from experiments.points import Point
from experiments.transforms import build, resolve

PARTS = ("arms", "ceiling")
STATES = ("own", "zero", "shuffled")
ARM = {"adapter": "", "context": True, "state": "own", "retrieve": False, "cache": {}, "soft": 0}
KEPT = ("experiment", "seed", "dtype")
LAST = "adapter"  # the last stage of a training
LESSON = (
    *("benchmarks", "episodes", "rows", "micro", "questions", "history", "question", "answer"),
    *("steps", "warmup", "rate", "final_rate", "clip"),
)


def validate(config: ConfigDict) -> None:
    """`ValueError` naming field and remedy, before a model is read or anything compiled."""
    if config.part not in PARTS:
        raise ValueError(f"config.part={config.part!r}: choose one of {', '.join(PARTS)}")
    if config.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"config.dtype={config.dtype!r}: use 'float32' or 'bfloat16'")
    for field, known in (("rows", config.arms), ("asked", config.benchmarks)):
        _among(f"config.{field}", config[field], known)
    _among("config.training.benchmarks", config.training.benchmarks, config.benchmarks)
    _among("config.training.lessons", config.training.lessons, config.lessons)
    for name, lesson in config.lessons.items():
        _among(f"config.lessons.{name}", lesson, LESSON)
        _among(f"config.lessons.{name}.benchmarks", lesson.benchmarks, config.benchmarks)
    _at_least("budget", config.budget, 1)
    for field, least in (("episodes", 2), ("batch", 1), ("new", 1), ("history", 1)):
        _at_least(f"evaluate.{field}", config.evaluate[field], least)
    _check_benchmarks(config)
    for name in config.adapters:
        for part in lessons(_adapter(config, name)[1]).values():
            _check_training(f"config.adapters.{name}", part)
    arms = {name: _arm(config, name) for name in config.arms}
    asked = {name: arms[name].soft for name in config.rows or arms if arms[name].soft}
    check_compressor(
        config.compressor, {f"config.arms.{name}.soft": ratio for name, ratio in asked.items()}
    )
    for name in config.mqar.cells:
        _memory(f"config.mqar.cells.{name}", config.mqar.cells[name])
    for field in ("key_count", "value_count", "embed", "steps", "batch"):
        _at_least(f"mqar.{field}", config.mqar[field], 2)


def _among(field: str, names: Collection[str], known: Collection[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{field}: no {name!r} there; choose among {', '.join(known)}")


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"config.{field}={value}: use {least} or more")


def _check_benchmarks(config: ConfigDict) -> None:
    from experiments.delta_mem.examples import benchmark  # JAX: not for a table made elsewhere

    taught = [label for lesson in config.lessons.values() for label in lesson.benchmarks]
    for label in dict.fromkeys([*config.asked, *config.training.benchmarks, *taught]):
        try:
            benchmark(_benchmark(config, label))
        except ValueError as error:
            raise ValueError(f"config.benchmarks.{label}: {error}") from error


def _benchmark(config: ConfigDict, label: str) -> ConfigDict:
    return ConfigDict({"name": label} | dict(config.benchmarks[label].items()))


def _check_training(field: str, training: ConfigDict) -> None:
    from experiments.delta_mem.training import objective

    for name in ("episodes", "rows", "micro", "questions", "history", "question", "answer",
                 "save_every"):  # fmt: skip
        if training[name] < 1:
            raise ValueError(f"{field}: training.{name}={training[name]}: use 1 or more")
    if training.steps < 1 or not 0 <= training.warmup < training.steps or training.rate <= 0:
        raise ValueError(f"{field}: training.steps={training.steps}, warmup={training.warmup}, "
                         f"rate={training.rate}; use 1 step or more, fewer for the warm-up, and a "
                         "rate above 0")  # fmt: skip
    if not training.benchmarks and not training.file:
        raise ValueError(f"{field}: training.benchmarks=(): name one, or a training.file")
    try:
        objective(training)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _memory(field: str, settings: ConfigDict) -> Any:
    from experiments.delta_mem.training import memory_config

    try:
        return memory_config(settings)
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from error


def _adapter(config: ConfigDict, name: str) -> tuple[ConfigDict, ConfigDict]:
    """An adapter with its name, and what it is trained by; `ValueError` for a wrong one."""
    field, own = f"config.adapters.{name}", dict(config.adapters[name].items())
    changes = dict(own.pop("training", {}))
    if set(own) not in ({"memory"}, {"lora"}):
        raise ValueError(f"{field}: holds {sorted(own)}; give either memory or lora")
    if "memory" in own:
        _memory(field, own["memory"])
    elif own["lora"].get("rank", 0) < 1:
        raise ValueError(f"{field}.lora: give a rank of 1 or more")
    _among(f"{field}.training", changes, config.training)
    for part, known in (("lessons", config.lessons), ("benchmarks", config.benchmarks)):
        _among(f"{field}.training.{part}", changes.get(part, ()), known)
    training = dict(config.training.items()) | changes
    by_message = "memory" in own and own["memory"].get("writes") == "message_mean"
    if by_message and training["context"] > 0:
        raise ValueError(f"{field}: training.context={training['context']}: message_mean reads "
                         "nothing that the same pass writes; use 0")  # fmt: skip
    before = {f"{i}-{lesson}": _asked(config, dict(config.lessons[lesson].items()))
              for i, lesson in enumerate(training["lessons"], start=1)}  # fmt: skip
    training = _asked(config, training) | {"lessons": before}
    return ConfigDict({"name": name, **own}), ConfigDict(training)


def lessons(training: ConfigDict) -> dict[str, ConfigDict]:
    """The trainings that a point's is made of, by the name of their stage: its lessons in their
    order, then what it says itself."""
    own = {field: value for field, value in training.items() if field != "lessons"}
    before = {name: ConfigDict(own | dict(training.lessons[name].items()))
              for name in sorted(training.lessons)}  # fmt: skip
    return before | {LAST: ConfigDict(own)}


def _asked(config: ConfigDict, training: dict[str, Any]) -> dict[str, Any]:
    """With the settings of benchmarks in place of their labels."""
    found = {label: _benchmark(config, label) for label in training["benchmarks"]}
    return training | {"benchmarks": found}


def _arm(config: ConfigDict, name: str) -> ConfigDict:
    """An arm with everything spelled out; `ValueError` for what cannot be."""
    field, own = f"config.arms.{name}", dict(config.arms[name].items())
    _among(field, own, ARM)
    arm = ConfigDict(ARM | own)
    if arm.adapter:
        _among(f"{field}.adapter", (arm.adapter,), config.adapters)
    if arm.state not in STATES:
        raise ValueError(f"{field}.state={arm.state!r}: choose one of {', '.join(STATES)}")
    if arm.state != "own" and (not arm.adapter or "memory" not in config.adapters[arm.adapter]):
        raise ValueError(f"{field}.state={arm.state!r}: needs an adapter that is a memory")
    if arm.retrieve and arm.context:
        raise ValueError(f"{field}.retrieve: instead of the history; set context=False")
    arm.cache = resolve(ConfigDict(arm.cache), f"{field}.cache")
    if not arm.context and arm.cache != resolve(ConfigDict(), field):
        raise ValueError(f"{field}.cache: there is no history to keep; set context=True")
    build(arm.cache)
    _check_soft(config, arm, f"{field}.soft={arm.soft!r}")
    return arm


def _check_soft(config: ConfigDict, arm: ConfigDict, field: str) -> None:
    if type(arm.soft) is not int or arm.soft < 0:
        raise ValueError(f"{field}: use how many tokens a soft one stands for, or 0 for none")
    if arm.soft and not arm.context:
        raise ValueError(f"{field}: there is no history to compress; set context=True")
    if arm.soft and arm.adapter and "memory" not in config.adapters[arm.adapter]:
        raise ValueError(f"{field}: the compressor's decoder takes a memory alone; use an adapter "
                         "that is one")  # fmt: skip


def points(config: ConfigDict, overridden: object = ()) -> list[Point]:
    """A point for each arm and benchmark; in the ceiling's part, one for each store as well."""
    rows = config.rows or tuple(config.arms)
    found = [_arm_point(config, arm, label) for label in config.asked for arm in rows]
    if config.part == "ceiling":
        found += [_store_point(config, name) for name in config.mqar.cells]
    return found


def _arm_point(config: ConfigDict, name: str, label: str) -> Point:
    """A point's config holds what defines it and no more, so that other rows do not touch it."""
    arm = _arm(config, name)
    adapter, training = _adapter(config, arm.adapter) if arm.adapter else (ConfigDict(),) * 2
    own = {field: config[field] for field in (*KEPT, "model", "budget", "evaluate")}
    own |= {"part": "arms", "label": label, "benchmark": _benchmark(config, label)}
    own |= {"arm": {"name": name, **arm}, "adapter": adapter, "training": training}
    if arm.soft:
        own["compressor"] = config.compressor
    else:
        del own["arm"]["soft"]
    return Point(f"{label}-{name}", ConfigDict(own))


def _store_point(config: ConfigDict, name: str) -> Point:
    own = {field: config[field] for field in KEPT}
    mqar = {k: v for k, v in config.mqar.items() if k != "cells"}
    own |= {"part": "mqar", "cell": config.mqar.cells[name], "mqar": mqar}
    return Point(f"mqar-{name}", ConfigDict(own))
