"""The front half that `launch` and `sweep` share: flags, checks, then points, table and picture."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from absl import flags, logging
from ml_collections import ConfigDict, config_flags

from experiments import plot, points, record, table
from experiments.args import check_types, config_module, node_at

CONFIG = config_flags.DEFINE_config_file("config", None, "the study, such as configs/x.py:smoke")
WORKDIR = flags.DEFINE_string("workdir", "", "where results go and are found again")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "list the points and what they lack; run nothing")
RUNNER = flags.DEFINE_enum("runner", "local", ["local", "ray"], "where points run")


def parse(argv: list[str]) -> list[str]:
    """For `app.run(main, flags_parser=parse)`: a wrong flag or field is one line and exit code 2.

    `config_flags` alone answers an unknown field with a traceback that does not say what there is.
    """
    logging.set_verbosity(logging.WARNING)  # JAX tells at length which backends are not there
    try:
        _check_paths(argv)
        return flags.FLAGS(argv)
    except (flags.Error, ValueError, AttributeError, TypeError, KeyError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _check_paths(argv: list[str]) -> None:
    """`ValueError` for an override such as `--config.lenght=1`, or a file that cannot be read."""
    words = " ".join(argv).replace("--config ", "--config=").split(" ")
    files = [word.partition("=")[2] for word in words if word.startswith("--config=")]
    if not files:
        raise ValueError("--config: missing; name a config file, such as configs/head_to_head.py")
    module, arg = config_module(files[-1])
    config = module.get_config(arg)
    for flag in argv:
        if flag.startswith("--config."):
            node_at(config, flag.removeprefix("--config.").partition("=")[0])


MakePoints = Callable[[ModuleType, ConfigDict, list[str]], list[points.Point]]


def run(make_points: MakePoints, argv: list[str]) -> int:
    """Checks everything, runs what has no result, then makes the table and the picture."""
    record.environment()
    try:
        if len(argv) > 1:
            raise ValueError(f"unexpected {argv[1:]}; fields are set with --config.field=value")
        if not WORKDIR.value and not DRY_RUN.value:
            raise ValueError("--workdir: missing; name a folder for the results")
        chosen = checked_points(make_points)
        if DRY_RUN.value:
            print("\n".join(dry_run(CONFIG.value, chosen)))
            return 0
        outcomes = points.run_all(chosen, Path(WORKDIR.value), RUNNER.value)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    code = points.finish(outcomes)
    show(Path(WORKDIR.value))
    return code


def checked_points(make_points: MakePoints) -> list[points.Point]:
    """The points of the config flag; `ValueError` for anything wrong with it."""
    config = CONFIG.value
    module, arg = config_module(config_flags.get_config_filename(flags.FLAGS["config"]))
    check_types(config, module.get_config(arg))
    points.study(config).validate(config)
    by_hand = list(config_flags.get_override_values(flags.FLAGS["config"]))
    return make_points(module, config, by_hand)


def dry_run(config: ConfigDict, chosen: list[points.Point]) -> list[str]:
    """What would run: as the study tells it, else the names of the points."""
    study = points.study(config)
    if hasattr(study, "dry_run"):
        return study.dry_run(config, chosen)
    return [point.name for point in chosen]


def show(workdir: Path) -> None:
    """Writes and prints the table of whatever has a result; says where everything is."""
    results = table.load(workdir)
    if not results:
        return
    for path in table.write(results, workdir):
        if path.suffix == ".md":
            print("\n" + path.read_text("utf-8"))
        print(f"wrote {path}")
    for path in plot.write(results, workdir):
        print(f"wrote {path}")
