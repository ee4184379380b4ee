"""Waiting for what other threads and processes do."""

import time


def wait_for(condition, seconds=60.0):
    """Wait until a function returns something true; an `AssertionError` if it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
