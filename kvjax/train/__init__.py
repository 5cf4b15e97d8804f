"""What training loops share: state, parts and stages, one compiled step, checkpoints, metrics."""

from kvjax.train.checkpoints import Checkpoints
from kvjax.train.loop import Fitted, fit
from kvjax.train.losses import chunked_cross_entropy
from kvjax.train.metrics import Log
from kvjax.train.schedule import Part, Stage
from kvjax.train.state import TrainState, put_together, take_apart
from kvjax.train.step import Losses, first_state, make_step

__all__ = [
    "Checkpoints",
    "Fitted",
    "Log",
    "Losses",
    "Part",
    "Stage",
    "TrainState",
    "chunked_cross_entropy",
    "first_state",
    "fit",
    "make_step",
    "put_together",
    "take_apart",
]
