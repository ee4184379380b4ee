"""Shifts `time.time` in every Python process that finds this folder on PYTHONPATH; monotonic clocks are untouched.

The shift in seconds is in the environment variable SHIFTED_CLOCK_SECONDS. Python imports this module at its start.
"""

import os
import time

SHIFT_SECONDS = int(os.environ["SHIFTED_CLOCK_SECONDS"])
real_time, real_time_ns = time.time, time.time_ns


def shifted_time() -> float:
    return real_time() + SHIFT_SECONDS


def shifted_time_ns() -> int:
    return real_time_ns() + SHIFT_SECONDS * 10**9


time.time, time.time_ns = shifted_time, shifted_time_ns
