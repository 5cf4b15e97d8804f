"""What every test shares: the platform and the settings of hypothesis. scripts/test runs it all."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports JAX; JAX_PLATFORMS=cuda in the environment wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Tests compile hundreds of small programs and run each for microseconds: most of their time would
# be LLVM's optimizer. `scripts/test --all` leaves it on.
if "KVJAX_TEST_OPTIMIZED" not in os.environ:
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_backend_optimization_level=0".strip()

from hypothesis import HealthCheck, settings

# Examples compile JAX programs, so a deadline would measure the compiler; a failure in CI must be
# the same failure at home.
settings.register_profile(
    "kvjax", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvjax")

MAPPINGS = 30_000  # Linux allows a process 65,530; the compiler crashes on the next one


@pytest.fixture(autouse=True, scope="module")
def _few_mappings() -> Iterator[None]:
    """Compiled programs keep their memory mapped: lets them go before there are too many."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > MAPPINGS:
        import jax

        jax.clear_caches()
