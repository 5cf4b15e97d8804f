"""Runs the points of a config file's `sweep()`, as `launch` runs its grid.

    python -m experiments.sweep --config=configs/head_to_head.py --workdir=DIR [--runner=ray]

`sweep()` yields overrides by dotted path, `{"cache.encode.key_bits": 4}`; each is checked like one
typed by hand, and all of them before the first one runs. With `--runner=ray` the points go to a
Ray cluster that sees the same workdir (`RAY_ADDRESS`; without it, this machine).
"""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from absl import app
from ml_collections import ConfigDict

from experiments import points, start
from experiments.args import check_types, with_overrides


def sweep_points(module: ModuleType, config: ConfigDict, by_hand: list[str]) -> list[points.Point]:
    """One point for each override, or as many as the study makes of it."""
    if not hasattr(module, "sweep"):
        raise ValueError("--config: this file has no sweep(); add one, or use experiments.launch")
    study, found = points.study(config), []
    for overrides in module.sweep():
        changed = with_overrides(config, overrides)
        check_types(changed, config)
        study.validate(changed)
        here = study.points(changed, [*by_hand, *overrides])
        found += [point._replace(name=point.name + _suffix(overrides)) for point in here]
    return found


def _suffix(overrides: Mapping[str, Any]) -> str:
    """What tells points apart that differ outside `cache`, which the study names itself."""
    rest = {path: value for path, value in overrides.items() if not path.startswith("cache.")}
    return "".join(f",{path}={value}" for path, value in rest.items())


def main(argv: list[str]) -> int:
    return start.run(sweep_points, argv)


if __name__ == "__main__":
    app.run(main, flags_parser=start.parse)
