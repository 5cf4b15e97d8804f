"""What every test shares: the platform and the settings of hypothesis. scripts/test runs it all."""

import os

# Before anything imports JAX; JAX_PLATFORMS=cuda in the environment wins.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hypothesis import HealthCheck, settings

# Examples compile JAX programs, so a deadline would measure the compiler; a failure in CI must be
# the same failure at home.
settings.register_profile(
    "kvjax", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvjax")
