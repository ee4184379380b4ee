"""A whole verl job in `separate_async` on one machine: a trainer and two replicas, each with a GPU slot of its own."""

import statistics

import pytest

from examples.quickstart.progress import LARGEST_DIFFERENCE, SAME_PROBABILITY
from examples.quickstart.progress import MAX_AGE as AGE
from tests.helpers.jobs import check_samples, end_of, job, log, metrics, samples

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS = 16
DIFFERENCE = "training/rollout_probs_diff_mean"  # of a token's probability, between an answer's weights and the newest
LARGEST_MEAN = 0.004  # 0.001 in a healthy job; 0.015 in one whose replicas ignored all updates but the first


def test_separate_replicas_follow_the_trainer_within_verls_age_limit(tmp_path):
    environment = {"VERL_LOGGING_LEVEL": "WARNING"}  # at INFO, verl 0.9.1 fails with hybrid_engine=false
    with job(tmp_path, mode="separate_async", replicas=2, steps=STEPS, environment=environment) as running:
        assert end_of(running) == 0, running.log_tail(60)
    assert "HistoPipe schedules 2 replicas" in log(tmp_path)
    check_samples(samples(tmp_path), list(range(1, STEPS + 1)))  # the limit is in `separate_arguments`
    logged = metrics(tmp_path)
    current = [line[LARGEST_DIFFERENCE] for line in logged.values() if line[AGE] == 0]
    assert current and max(current) < SAME_PROBABILITY
    assert sum(line.get("rhyme/spec/accepted_tokens", 0) for line in logged.values()) > 0
    differences = [logged[step][DIFFERENCE] for step in range(STEPS // 2 + 1, STEPS + 1)]
    assert 0 < statistics.mean(differences) < LARGEST_MEAN, differences
