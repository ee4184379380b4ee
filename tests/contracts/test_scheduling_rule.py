"""What every scheduling rule has to keep, whatever it optimises; random clusters, all cases of the simulator.

To try a rule of your own, add a `Case` with it to `CASES` in `rhyme_verl/sim/experiment.py`: these tests then run it
(CONTRIBUTING.md has an example).
"""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rhyme_verl.sim.experiment import play
from tests.helpers.simulation import cases, fitting, random_scenario, sizes


@settings(max_examples=80, deadline=None)
@given(sizes, cases)
def test_every_token_and_answer_is_generated_once(size, case):
    scenario = random_scenario(size)
    _, run = play(scenario, fitting(case, scenario))
    trained = run.trained_in >= 0
    assert trained.sum() == scenario.workload.lengths.size
    seconds = np.zeros(len(run.lengths))
    for _, answer, start, end in run.segments:
        seconds[answer] += end - start
    assert np.all(seconds[trained] > 0.0)
    generated = sum(replica.generated_tokens for replica in run.replicas)
    parts = run.interrupted + len(run.lengths)  # the part of a token is lost at each interruption
    assert run.lengths[trained].sum() - 1 <= generated <= run.lengths.sum() + parts
    assert len(run.trained) == 6 and run.trained == sorted(run.trained)


@settings(max_examples=80, deadline=None)
@given(sizes, cases)
def test_no_replica_runs_more_than_it_can(size, case):
    scenario = random_scenario(size)
    _, run = play(scenario, fitting(case, scenario))
    for replica in range(len(scenario.speeds)):
        own = [(start, 1) for r, _, start, _ in run.segments if r == replica]
        own += [(end, -1) for r, _, _, end in run.segments if r == replica]
        assert max(np.cumsum([change for _, change in sorted(own)]), default=0) <= scenario.max_running


@settings(max_examples=80, deadline=None)
@given(sizes, cases, st.sampled_from([0.0, 0.0, 0.3]))
def test_no_answer_is_older_than_the_case_allows(size, case, filtered):
    scenario = random_scenario(size)
    if case.mode in ("colocate_async", "separate_async"):
        scenario = replace(scenario, filtered=filtered)
    _, run = play(scenario, fitting(case, scenario))
    ages = run.age[run.trained_in >= 0]
    assert ages.min() >= 0
    allowed = {"sync": 0, "one_step_off": 1, "pipelined": 1}.get(case.mode)
    if case.has_units:
        allowed = case.max_age
    if allowed is not None:
        assert ages.max() <= allowed
    if case.mode != "separate_async" and allowed in (0, 1):
        assert np.all(run.versions_spanned[run.trained_in >= 0] == 1)
