"""Starts Ray in this process, for tests."""

import logging

import ray


def start_ray(num_cpus):
    """Start a node of its own; a second time if the first does not come up in time beside other tests."""
    arguments = {"address": "local", "num_cpus": num_cpus, "include_dashboard": False, "log_to_driver": False}
    try:
        ray.init(**arguments, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises nothing more specific
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        ray.init(**arguments, logging_level=logging.ERROR)
