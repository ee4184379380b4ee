"""Placeholders for drafts cost the host time, so they rest where no draft is accepted."""

from itertools import count, groupby

import pytest

from examples.quickstart.policy import SHIPPED_POLICY
from rhyme_verl.histospec import async_proposer
from rhyme_verl.histospec.async_scheduler import LEAST_REST, PATIENCE, TRIAL_STEPS
from tests.helpers.engine import core_of, engine, generate, proposer_of, quickstart_prompts, remember

pytestmark = pytest.mark.engine

ROWS = 32
GREEDY = {"temperature": 0.0, "max_tokens": 160, "ignore_eos": True}
IN_FLIGHT = 2  # steps that have been scheduled when it is seen that nothing was accepted


def runs_of(llm, prompts):
    """Generate; return whether steps of all rows have placeholders, as (answer, number of steps in a row)."""
    scheduler, steps = core_of(llm).scheduler, []
    schedule = scheduler.schedule

    def recorded(*args, **kwargs):
        output = schedule(*args, **kwargs)
        if len(output.scheduled_cached_reqs.req_ids) == ROWS:
            steps.append(bool(output.scheduled_spec_decode_tokens))
        return output

    scheduler.schedule = recorded
    generate(llm, prompts, **GREEDY)
    scheduler.schedule = schedule
    return [(has_some, len(list(group))) for has_some, group in groupby(steps)]


def test_placeholders_rest_while_nothing_is_accepted_and_are_there_when_a_rollout_begins():
    prompts = quickstart_prompts(ROWS)
    with engine(SHIPPED_POLICY, {"spec": {"min_acceptance": 1.0}}, 8, asynchronous=True) as llm:
        for _ in range(2):
            first, rest, trial, second_rest, *_ = runs_of(llm, prompts)
            assert first == (True, PATIENCE // ROWS + IN_FLIGHT)
            assert rest == (False, LEAST_REST)
            assert trial[0] and TRIAL_STEPS <= trial[1] <= TRIAL_STEPS + IN_FLIGHT
            assert second_rest == (False, 2 * LEAST_REST)


def test_placeholders_never_rest_while_drafts_are_accepted_or_the_policy_is_fixed():
    prompts = quickstart_prompts(ROWS)
    with engine(SHIPPED_POLICY, {"spec": {"policy": "fixed", "min_acceptance": 1.0}}, 8, asynchronous=True) as llm:
        assert [has_some for has_some, _ in runs_of(llm, prompts)] == [True]
    with engine(SHIPPED_POLICY, {"spec": {"min_acceptance": 0.05}}, 8, asynchronous=True) as llm:
        ticks = count()
        proposer_of(llm).clock = lambda: 0.01 * next(ticks)  # as if all steps took the same time
        for output, prompt in zip(generate(llm, prompts, **GREEDY), prompts, strict=True):
            remember(llm, prompt, list(output.token_ids))
        assert [has_some for has_some, _ in runs_of(llm, prompts)] == [True]


def test_with_many_rows_only_steps_without_placeholders_show_what_an_undrafted_step_costs(monkeypatch):
    monkeypatch.setattr(async_proposer, "MANY_ROWS", ROWS)
    prompts = quickstart_prompts(ROWS)
    with engine(SHIPPED_POLICY, {"spec": {"min_acceptance": 1.0}}, 8, asynchronous=True) as llm:
        proposer, bare, known = proposer_of(llm), [], []
        schedule = core_of(llm).scheduler.schedule

        def recorded(*args, **kwargs):
            proposer._await_helper()
            known.append(not proposer.drafter.wants_undrafted(ROWS))
            output = schedule(*args, **kwargs)
            bare.append(not output.scheduled_spec_decode_tokens and bool(output.scheduled_cached_reqs.req_ids))
            return output

        core_of(llm).scheduler.schedule = recorded
        generate(llm, prompts, **GREEDY)
    rest = bare.index(True, bare.index(False))  # where placeholders rest for the first time
    assert not any(known[: rest + async_proposer.BARE_STEPS]), "steps with placeholders have been counted"
    assert all(known[rest + LEAST_REST :])
