"""Hypothesis profiles: ``fast`` by default, ``HYPOTHESIS_PROFILE=long`` for a thorough run."""

import os

from hypothesis import HealthCheck, settings

_MACHINES = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

# The same examples on every run: a failure here is a failure everywhere.
settings.register_profile(
    "fast",
    max_examples=100,
    stateful_step_count=30,
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=_MACHINES,
)
settings.register_profile(
    "long",
    max_examples=3000,
    stateful_step_count=60,
    deadline=None,
    print_blob=True,
    suppress_health_check=_MACHINES,
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fast"))
