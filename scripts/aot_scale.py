"""`experiments.launch --config=configs/scale.py` on a machine without a TPU; see that config.

    .venv/bin/python scripts/aot_scale.py --workdir=DIR [--config.rows="('v5e:2x2',)"]
"""

import os
import sys
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"  # before anything imports JAX; the compiler needs no chip
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from absl import app  # noqa: E402

from experiments import launch, start  # noqa: E402

if __name__ == "__main__":
    if not any(argument.startswith("--config=") for argument in sys.argv):
        sys.argv.insert(1, f"--config={ROOT / 'configs/scale.py'}")
    app.run(launch.main, flags_parser=start.parse)
