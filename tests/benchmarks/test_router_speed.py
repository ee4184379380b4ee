"""The router half of bench-pipe, with few answers: it must finish and measure something."""

import pytest
import ray

from benchmarks.scheduling.router_speed import SAMPLES, decision_microseconds, saving_lag
from tests.helpers.ray_node import start_ray


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start_ray(num_cpus=8)
    yield
    ray.shutdown()


def test_every_answer_is_decided():
    found = decision_microseconds(replicas=2, groups=4)
    assert found["answers"] == 4 * SAMPLES
    assert 0 < found["mean_us"]


def test_calls_are_answered_while_lengths_are_saved():
    found = saving_lag(prompts=100)
    assert 0 < found["median_call_ms"] <= found["longest_call_ms"]
