"""Every test sees eight CPU devices and draws the same Hypothesis examples in every run.

The environment is set here because JAX reads it once, when it starts its backend.
"""

import gc
import os
import pathlib

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    flags = [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
    os.environ["XLA_FLAGS"] = " ".join(flags).strip()

import jax

# The first call of a jitted function compiles: an example's time says nothing about the code.
settings.register_profile(
    "trace_jax", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("trace_jax")


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Drops compiled programs before they are too many for one process.

    Each takes memory maps, of which Linux grants 65,530; beyond them XLA crashes.
    """
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 20_000:
        jax.clear_caches()
        gc.collect()
