"""How hypothesis runs (always the same few examples; `thorough`: many), and processes."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "short",
    derandomize=True,
    deadline=None,
    max_examples=40,
    stateful_step_count=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", settings.get_profile("short"), max_examples=5000)
# Processes that tests start take kvcore from where it is installed, not from the checkout
# that happens to be the working directory.
os.environ["PYTHONSAFEPATH"] = "1"
# Tests run side by side: threads that wait for one another's time slices take far longer.
os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "short"))
