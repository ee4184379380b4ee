"""Whole verl jobs in `colocate_async` whose rollouts HistoPipe schedules: ages, filtered groups, a killed driver."""

import os
import signal

import pytest

from examples.quickstart.progress import LARGEST_DIFFERENCE, MAX_AGE, SAME_PROBABILITY
from examples.tool_agent.run import overrides as tool_agent
from tests.helpers.jobs import check_samples, end_of, job, log, metrics, samples, snapshot_file, wait_for

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.faults]

STEPS = 9


def test_validation_filtered_groups_and_a_resume_within_a_unit(tmp_path):
    """Units begin in steps 1, 3, 5 ...; the checkpoint of step 4 and the validation after step 3 are within them."""
    overrides = (
        "trainer.save_freq=4",
        "trainer.test_freq=3",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.metric=reward",
        "+trainer.v1.sampler.sampler_kwargs.filter_groups_metric=reward",
    )
    with job(tmp_path, *overrides, steps=STEPS) as running:
        wait_for(lambda: len(samples(tmp_path)) >= 6, running)
        os.killpg(os.getpgid(running._process.pid), signal.SIGKILL)
    before, first_run = samples(tmp_path), metrics(tmp_path)
    assert "num_warmup_batches is set to 2" in log(tmp_path) and "units of 2 batches" in log(tmp_path)
    assert snapshot_file(tmp_path, 4).exists()
    with job(tmp_path, *overrides, steps=STEPS) as running:
        assert end_of(running) == 0, running.log_tail(60)
    assert f"history resumed from {snapshot_file(tmp_path, 4).parent}" in log(tmp_path)
    resumed = samples(tmp_path)[len(before) :]
    check_samples([*before[:4], *resumed], list(range(1, STEPS + 1)))
    logged = metrics(tmp_path).values()
    assert any("val-core" in name for line in logged for name in line)
    assert any(line.get("training/filter_groups/evicted_samples", 0) for line in logged)
    assert any("rhyme/pipe/bubble" in line for line in logged)
    # The resumed run may train on older answers in every step; the first step of a job never does.
    current = [line[LARGEST_DIFFERENCE] for line in [first_run[1], *logged] if line[MAX_AGE] == 0]
    assert current and max(current) < SAME_PROBABILITY, "answers of age 0 are of the weights that they are trained with"


def test_a_tool_agents_turns_within_units(tmp_path):
    with job(tmp_path, *tool_agent(tmp_path / "trace"), steps=5) as running:
        assert end_of(running) == 0, running.log_tail(60)
    check_samples(samples(tmp_path), [1, 2, 3, 4, 5])
