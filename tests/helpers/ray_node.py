"""Starts Ray in this process, for tests."""

import logging

import ray

ATTEMPTS = 4  # Ray gives a node 30 s, which is not always enough beside other tests


def start_ray(num_cpus):
    """Start a node of its own; again if it does not come up in time."""
    arguments = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False, "log_to_driver": False}
    for attempt in range(ATTEMPTS):
        try:
            ray.init(**arguments, logging_level=logging.ERROR)
            return
        except Exception as error:  # Ray raises nothing more specific
            ray.shutdown()
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS - 1:
                raise
