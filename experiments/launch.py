"""Runs a study: every point of its grid, then its table and its picture.

    python -m experiments.launch --config=configs/head_to_head.py[:smoke] --workdir=DIR \
        [--config.length=2048] [--config.cache.encode.key_bits=2]

Points that have their result are skipped, so a killed run goes on where it was. A point that fails
is listed at the end, the rest runs, and the exit code is 1; a wrong config ends at once with 2.
`--dry_run` lists the points, and what they lack where the study knows it, and runs nothing.
"""

from types import ModuleType

from absl import app
from ml_collections import ConfigDict

from experiments import points, start


def grid_points(_: ModuleType, config: ConfigDict, by_hand: list[str]) -> list[points.Point]:
    """The points that the study itself makes of its config."""
    return points.study(config).points(config, by_hand)


def main(argv: list[str]) -> int:
    return start.run(grid_points, argv)


if __name__ == "__main__":
    app.run(main, flags_parser=start.parse)
