"""Checkpoints by orbax: a state and, as JSON, where the run was; each there whole or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class Checkpoints:
    """The newest checkpoints of a run in one folder.

    Args:
      folder: where; made if needed.
      keep: how many stay.
    """

    def __init__(self, folder: Path, keep: int = 2) -> None:
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, create=True, enable_async_checkpointing=False
        )
        self._manager = ocp.CheckpointManager(folder.resolve(), options=options)

    def save(self, number: int, state: Any, place: dict[str, Any]) -> None:
        """Writes checkpoint `number`, above all before: a tree of arrays, and JSON."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state),
                                  place=ocp.args.JsonSave(place))  # fmt: skip
        self._manager.save(number, args=args, force=True)

    def latest(self) -> tuple[int, dict[str, Any]] | None:
        """Number and JSON of the newest checkpoint; None where there is none."""
        number = self._manager.latest_step()
        if number is None:
            return None
        args = ocp.args.Composite(place=ocp.args.JsonRestore())
        return number, self._manager.restore(number, args=args)["place"]

    def restore(self, number: int, like: Any) -> Any:
        """The state of a checkpoint, in the shapes, dtypes and shardings of `like`."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        return self._manager.restore(number, args=args)["state"]

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()
