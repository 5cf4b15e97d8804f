"""What every test shares: the platform and the settings of hypothesis. scripts/test runs it all."""

import os

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
