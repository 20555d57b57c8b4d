"""What every test shares: warnings are errors (pyproject.toml), and in CI a skip that could have run is one too."""

import os
import signal

import pytest
from hypothesis import HealthCheck, settings

# No test depends on how busy the machine is, and a folder of a test may serve all of its examples.
settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("shared machine")
os.environ["AMPWATCH_SPOOL_MIN_FREE_BYTES"] = "0"  # no test depends on how full the disk of the machine is
# A shell has what runs in its background ignore an interrupt, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    """With AMPWATCH_NO_SKIP a skipped test fails, unless it needs a GPU that the machine lacks."""
    outcome = yield
    report = outcome.get_result()
    if item.get_closest_marker("gpu"):
        return
    if report.skipped and os.environ.get("AMPWATCH_NO_SKIP") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped in CI, where it must run: {report.longrepr}"
