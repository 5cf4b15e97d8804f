"""From a config to its arms, and everything about a config that can be wrong beforehand."""

import copy

from ml_collections import ConfigDict

from experiments.points import Point

KINDS = ("text", "continual", "reconstruction", "needle", "expand",
         "raw_reconstruction", "raw_needle", "raw_expand")  # fmt: skip
TRAINED = ("adapter", "encoder", "decoder")


def validate(config: ConfigDict) -> None:
    """`ValueError` naming field and remedy, before a model is made or anything compiled."""
    for field in ("rows", "length", "windows", "micro", "chunk"):
        _at_least(f"shape.{field}", config.shape[field], 1)
    for name, value in config.evaluate.items():
        _at_least(f"evaluate.{name}", value, 2)
    if config.dtype not in ("float32", "bfloat16"):
        raise ValueError(f"config.dtype={config.dtype!r}: use 'float32' or 'bfloat16'")
    if config.model.decoder not in ("frozen", "lora", "full"):
        raise ValueError(
            f"config.model.decoder={config.model.decoder!r}: use 'frozen', 'lora' or 'full'"
        )
    short, long = config.data.spans
    if not 1 <= short <= long:
        raise ValueError(f"config.data.spans={config.data.spans}: shortest first, 1 or more")
    for row in config.rows:
        if row not in config.arms:
            raise ValueError(
                f"config.rows: no {row!r} among the arms; choose {', '.join(config.arms)}"
            )
    for name, arm in config.arms.items():
        _check_ratios(f"config.arms.{name}.ratios", arm.ratios, config.model.window)
    for name, mixture in config.data.mixtures.items():
        _check_mixture(f"config.data.mixtures.{name}", mixture)
    for name, stage in config.stages.items():
        _check_stage(f"config.stages.{name}", stage)


def _at_least(field: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"config.{field}={value}: use {least} or more")


def _check_ratios(field: str, ratios: tuple[int, ...], window: int) -> None:
    if not ratios or min(ratios) < 1:
        raise ValueError(f"{field}={ratios}: give at least one ratio, each 1 or more")
    for ratio in ratios:
        if window % ratio:
            raise ValueError(f"config.model.window={window}: use a multiple of the ratio {ratio}")


def _check_mixture(field: str, mixture: ConfigDict) -> None:
    for kind, share in mixture.items():
        if kind not in KINDS:
            raise ValueError(f"{field}.{kind}: unknown; choose among {', '.join(KINDS)}")
        if share < 0:
            raise ValueError(f"{field}.{kind}={share}: a share is 0 or more")
    kept = [share for kind, share in mixture.items() if "reconstruction" not in kind]
    if sum(kept) <= 0:
        raise ValueError(f"{field}: give some kind besides reconstruction a share above 0")


def _check_stage(field: str, stage: ConfigDict) -> None:
    if stage.steps < 1 or not 0 <= stage.warmup < stage.steps:
        raise ValueError(
            f"{field}: steps={stage.steps}, warmup={stage.warmup}; use 1 step or more, and fewer "
            "for the warm-up"
        )
    for part, rate in stage.rates.items():
        if part not in TRAINED or rate <= 0:
            raise ValueError(
                f"{field}.rates.{part}={rate}: a rate above 0 for one of {', '.join(TRAINED)}"
            )


def points(config: ConfigDict, overridden: object = ()) -> list[Point]:
    """One point for each arm, or for those that `config.rows` names."""
    return [_point(config, name) for name in config.rows or tuple(config.arms)]


def _point(config: ConfigDict, name: str) -> Point:
    """A point's config holds what defines it and no more, so that other arms do not touch it."""
    own = copy.deepcopy(config).unlock()
    own.update(config.arms[name])
    del own["arms"], own["rows"]
    return Point(name, ConfigDict(own).lock())
