"""Four stages of the toy model, slow enough to be killed: python -m tests.train.killed FOLDER"""

import sys
import time
from pathlib import Path

from kvjax.train import fit, take_apart
from tests.train import toy

STAGES = tuple(toy.stage(40, embed=i > 1, name=f"stage {i}") for i in range(4))


class Slow(toy.Counted):
    def __next__(self):
        time.sleep(0.01)
        return super().__next__()


if __name__ == "__main__":
    frame, _ = take_apart(toy.Toy())
    fit(frame, toy.params(), STAGES, toy.loss, lambda _: Slow(), Path(sys.argv[1]), save_every=4)
