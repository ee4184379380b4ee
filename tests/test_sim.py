"""The simulated cluster: exact times of small cases, nothing lost, no bound beaten, staleness as each mode has it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rhyme_verl.cli import app
from rhyme_verl.histopipe.ranges import Fleet
from rhyme_verl.histopipe.step_cost import PREFILL_SECONDS_PER_TOKEN, StepCost, load
from rhyme_verl.sim.cluster import Replica
from rhyme_verl.sim.experiment import COMBINATIONS, OURS, Scenario, lower_bound, make_policy, play
from rhyme_verl.sim.trainer import Simulation, Trainer
from rhyme_verl.sim.workload import LogNormal, Workload, from_distribution, from_trace

TRACE = Path(__file__).parents[1] / "benchmarks/traces/quickstart.parquet"
COST = StepCost.affine(0.015, 5e-5, 128)
STEP = [0.0, 1.0, 1.5, 2.0]  # seconds of a step by running sequences


def workload_of(lengths):
    lengths = np.array(lengths)
    mean = lengths.mean(axis=2)
    return Workload(
        lengths=lengths, p50=mean, p90=mean, mean=mean, max_tokens=float(lengths.max()),
        rank_correlation=1.0, rank_churn=0.0,
    )  # fmt: skip


def scenario_of(workload, replicas=4, max_running=8, speeds=None, **kwargs):
    speeds = np.ones(replicas) if speeds is None else speeds
    return Scenario(workload=workload, fleet=Fleet(speeds=speeds, max_running=max_running, cost=COST), **kwargs)


def test_a_replica_slows_down_with_what_it_runs():
    replica = Replica(STEP, 3)
    replica.start(0, 10, 0.0)
    replica.start(1, 4, 2.0)  # sequence 0 has 2 tokens
    assert replica.next_end() == pytest.approx(2.0 + 4 * 1.5)
    assert replica.pop_ended(8.0) == [(1, 2.0)]
    assert replica.next_end() == pytest.approx(8.0 + 4 * 1.0)
    assert replica.pop_ended(12.0) == [(0, 0.0)]
    assert replica.generated_tokens == pytest.approx(14)
    assert (replica.busy_seconds, replica.sequence_seconds) == pytest.approx((12.0, 18.0))


def test_a_moved_sequence_goes_on_where_it_was_after_its_prefix():
    source, target = Replica(STEP, 3), Replica(STEP, 3)
    source.start(7, 10, 0.0)
    source.start(8, 10, 0.0)
    assert source.remove(7, 6.0) == (4, 0.0)
    target.start(7, 6, 6.0, before=4, recompute_seconds=0.5)
    assert source.next_end() == pytest.approx(6.0 + 6 * 1.0)
    assert target.next_end() == pytest.approx(6.5 + 6 * 1.0)
    assert target.stalled_seconds == 0.5
    target.advance(8.5)
    assert target.tokens_of(7) == pytest.approx(6)


def test_sync_steps_and_training_take_turns():
    scenario = scenario_of(workload_of([[[100, 200]], [[50, 50]]]), replicas=2, train_seconds=3.0)
    outcome, run = play(scenario, "sync", "default")
    one = COST.seconds[1]
    assert run.rolled_out == pytest.approx([200 * one, 200 * one + 3.0 + 50 * one])
    assert run.trained == pytest.approx([200 * one + 3.0, 250 * one + 6.0])
    assert outcome.staleness_max == 0


def test_one_step_off_rolls_out_while_training():
    scenario = scenario_of(workload_of([[[100]], [[100]], [[100]]]), replicas=1, train_seconds=0.5)
    _, run = play(scenario, "one_step_off", "default")
    assert run.rolled_out == pytest.approx([100 * COST.seconds[1] * k for k in (1, 2, 3)])
    assert run.staleness.tolist() == [0, 1, 1]


def test_pipelined_steps_overlap_and_replicas_drain_before_new_weights():
    scenario = scenario_of(workload_of([[[400]], [[100]], [[100]]]), replicas=2, train_seconds=1.0)
    _, run = play(scenario, "pipelined", "histopipe")
    one = COST.seconds[1]
    assert run.opened == pytest.approx([0.0, 0.0, 400 * one + 1.0])
    assert run.staleness.tolist() == [0, 1, 1]
    assert np.all(run.versions_spanned == 1)


def one_long_answer():
    lengths = np.full((6, 4, 1), 100)
    lengths[0, 0, 0] = 320
    return workload_of(lengths)


def test_separate_trainers_change_weights_in_the_midst_of_answers():
    scenario = scenario_of(one_long_answer(), replicas=2, max_running=4, train_seconds=0.1)
    outcome, run = play(scenario, "separate_async", "default")
    assert run.staleness[0] == outcome.staleness_max == run.trained_in[0] == 3
    assert run.versions_spanned[0] == 4
    assert outcome.recompute_seconds > 0.0
    _, patient = play(replace(scenario, recompute_seconds_per_token=0.0), "separate_async", "default")
    (end,) = (end for _, sequence, _, end in patient.segments if sequence == 0)
    assert end == pytest.approx(320 * COST.seconds[1], rel=0.01)


def test_colocated_trainers_stop_the_replicas():
    """While three trainings take a second each, the long answer stands still."""
    scenario = scenario_of(
        one_long_answer(), replicas=2, max_running=4, train_seconds=1.0, recompute_seconds_per_token=0.0
    )
    _, run = play(scenario, "colocate_async", "default")
    assert run.trained_in[0] == 3 and run.versions_spanned[0] == 4
    (end,) = (end for _, sequence, _, end in run.segments if sequence == 0)
    assert end == pytest.approx(3 * 1.0 + 320 * COST.seconds[1], rel=0.01)
    trainings = [(second - 1.0, second) for second in run.trained]
    assert not any(begin + 1e-6 < end < over - 1e-6 for _, _, _, end in run.segments for begin, over in trainings)


def test_a_colocated_pair_is_trained_after_one_rollout():
    lengths = [[[400]], [[100]], [[50]]]
    scenario = scenario_of(workload_of(lengths), replicas=2, train_seconds=1.0)
    outcome, run = play(scenario, "colocate_async", "histopipe")
    one = COST.seconds[1]
    assert run.opened == pytest.approx([0.0, 0.0, 400 * one + 2.0])
    assert run.trained == pytest.approx([400 * one + 1.0, 400 * one + 2.0, 450 * one + 3.0])
    assert run.staleness.tolist() == [0, 1, 0]
    assert outcome.spanning == outcome.recompute_seconds == 0.0


def test_streams_take_the_oldest_step_first_and_of_it_the_longest():
    scenario = scenario_of(workload_of([[[10], [20]], [[30], [40]]]), replicas=1, max_running=1)
    _, run = play(scenario, "separate_async", "histopipe")
    assert [sequence for _, sequence, _, _ in run.segments] == [1, 0, 3, 2]


sizes = st.tuples(st.integers(0, 2**31), st.integers(1, 5), st.integers(1, 10), st.integers(1, 4))


def random_scenario(size):
    seed, replicas, groups, samples = size
    rng = np.random.default_rng(seed)
    workload = from_distribution(
        LogNormal(median=60.0, p99_over_median=float(rng.uniform(1.5, 10)), cap=400, within_group=rng.uniform(0, 1)),
        steps=4,
        groups=groups,
        samples=samples,
        epochs_before=int(rng.integers(0, 3)),
        seed=seed,
    )
    speeds = rng.uniform(0.5, 2.0, replicas)
    train_seconds = float(rng.choice([0.0, 0.7, 5.0]))
    return scenario_of(workload, speeds=speeds, max_running=int(rng.integers(1, 9)), train_seconds=train_seconds)


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from(COMBINATIONS))
def test_every_token_and_sequence_is_generated_once(size, combination):
    scenario = random_scenario(size)
    outcome, run = play(scenario, *combination)
    lengths = scenario.workload.lengths.ravel()
    generated = sum(replica.generated_tokens for replica in run.replicas)
    assert (
        lengths.sum() - 0.1 <= generated <= lengths.sum() + 0.1 + outcome.moved
    )  # a part of a token is lost in a move
    ends = np.bincount([sequence for _, sequence, _, _ in run.segments], minlength=len(lengths))
    assert ends.sum() == len(lengths) + outcome.moved and ends.min() >= 1
    assert len(run.trained) == len(run.rolled_out) == 4 and run.trained == sorted(run.trained)


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from(COMBINATIONS))
def test_no_replica_runs_more_than_it_can(size, combination):
    scenario = random_scenario(size)
    _, run = play(scenario, *combination)
    for replica in range(len(scenario.fleet.speeds)):
        own = [(start, 1) for r, _, start, _ in run.segments if r == replica]
        own += [(end, -1) for r, _, _, end in run.segments if r == replica]
        assert max(np.cumsum([change for _, change in sorted(own)]), default=0) <= scenario.fleet.max_running


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from(COMBINATIONS))
def test_the_lower_bound_is_never_beaten(size, combination):
    scenario = random_scenario(size)
    outcome, _ = play(scenario, *combination)
    bounds = {"sync": 1, "one_step_off": 1, "pairs": 2}  # of the others parts of all steps may overlap
    together = bounds.get(outcome.mode, len(scenario.workload.lengths))
    if outcome.mode == "colocate_async" and outcome.policy in OURS:
        together = 2
    assert outcome.rollout_seconds >= lower_bound(scenario, together) * (1 - 1e-9)
    assert 0.0 <= outcome.idle <= outcome.bubble + 1e-9 <= 1.0 + 1e-9


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from(COMBINATIONS))
def test_staleness_is_what_the_mode_allows(size, combination):
    outcome, run = play(random_scenario(size), *combination)
    assert run.staleness.min() >= 0
    if outcome.mode != "separate_async" and (outcome.mode != "colocate_async" or outcome.policy in OURS):
        assert outcome.staleness_max <= (0 if outcome.mode == "sync" else 1)
        assert outcome.spanning == outcome.recompute_seconds * (outcome.moved == 0) == 0.0


def test_drafting_makes_everything_faster_by_its_factor():
    workload = from_distribution(LogNormal(), steps=2, groups=16, samples=4)
    for combination in (("sync", "default"), ("pairs", "histopipe")):
        plain, drafted = (play(scenario_of(workload, tokens_per_step=factor), *combination)[0] for factor in (1.0, 2.0))
        assert drafted.rollout_seconds == pytest.approx(plain.rollout_seconds / 2, rel=0.02)
        assert drafted.of_bound == pytest.approx(plain.of_bound, rel=0.02)


@pytest.mark.parametrize(("tail", "share"), [(8.0, 0.87), (3.0, 0.95)])
def test_pairs_come_close_to_the_lower_bound(tail, share):
    """The stated scenario: 64 replicas of 128, 512 groups of 16, median 2,000, cap 16k."""
    workload = from_distribution(LogNormal(p99_over_median=tail), steps=2, groups=512, samples=16)
    scenario = scenario_of(workload, replicas=64, max_running=128)
    rival = play(scenario, "one_step_off", "default")[0]
    ours = play(scenario, "pairs", "histopipe")[0]
    assert ours.of_bound >= share
    assert ours.steps_per_hour >= 1.8 * rival.steps_per_hour


@pytest.mark.parametrize(("tail", "cap"), [(8.0, 2048), (3.0, 2048), (8.0, 4096), (8.0, 16384), (3.0, 16384)])
def test_a_barrier_is_reached_no_later_than_by_verls_default(tail, cap):
    workload = from_distribution(LogNormal(p99_over_median=tail, cap=cap), steps=1, groups=256, samples=16)
    scenario = scenario_of(workload, replicas=32, max_running=128)
    default, predicted, perfect = (
        play(scenario, "sync", policy)[0].rollout_seconds for policy in ("default", "histopipe", "perfect")
    )
    assert predicted <= default and perfect <= default


def test_a_trace_is_played():
    workload = from_trace(TRACE, cap=400, scale=40.0, repeat=2)
    assert workload.lengths.shape == (4, 32, 8)
    assert workload.lengths.max() <= 16000
    assert workload.rank_correlation > 0.9
    outcome, _ = play(scenario_of(workload), "pairs", "histopipe")
    assert outcome.of_bound > 0.5


def test_a_trace_of_one_epoch_is_refused(tmp_path):
    import pyarrow.compute as pc

    from rhyme_verl.trace import read_trace, write_trace

    table = read_trace(TRACE)
    write_trace(tmp_path / "one.parquet", table.filter(pc.equal(table.column("epoch"), 1)))
    with pytest.raises(ValueError, match="two epochs or more"):
        from_trace(tmp_path / "one.parquet")


def test_lengths_are_drawn_as_stated():
    distribution = LogNormal(median=500.0, p99_over_median=4.0, cap=100000)
    lengths = distribution.sample(np.random.default_rng(0), 4000, 8, 1)
    assert np.median(lengths) == pytest.approx(500, rel=0.03)
    assert np.percentile(lengths, 99) == pytest.approx(2000, rel=0.1)


def test_a_policy_that_leaves_sequences_behind_is_noticed():
    class Idle:
        def opened(self, step, cluster):
            pass

        def freed(self, replica, cluster):
            pass

    scenario = scenario_of(workload_of([[[10]]]))
    with pytest.raises(AssertionError, match="left sequences behind"):
        Simulation(scenario.workload, scenario.fleet, Idle(), Trainer(mode="sync")).run()


def test_a_measured_step_cost_is_read(tmp_path):
    path = tmp_path / "cost.json"
    path.write_text('{"running": [1, 4], "ms": [10, 16], "prefill_us_per_token": 30, "model": "any"}')
    measured = load(path)
    assert measured.table(8).seconds.tolist() == pytest.approx(
        [0.01, 0.01, 0.012, 0.014, 0.016, 0.02, 0.024, 0.028, 0.032]
    )
    assert measured.prefill_seconds_per_token == pytest.approx(3e-5)
    path.write_text('{"running": [1], "ms": [10]}')
    assert load(path).prefill_seconds_per_token == PREFILL_SECONDS_PER_TOKEN


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"running": 1, "ms": 2}', '{"running": [2, 1], "ms": [1, 1]}', '{"running": [], "ms": []}'],
)
def test_what_is_no_step_cost_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "cost.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"cost\.json: not a step-cost table of `rhyme calibrate`: [^\n]+$"):
        load(path)


def test_unknown_policies_are_refused():
    with pytest.raises(ValueError, match="choose from default"):
        make_policy("defualt", "sync", scenario_of(workload_of([[[10]]])).fleet)


def test_command_writes_a_table_a_result_and_a_picture(tmp_path):
    arguments = "simulate --replicas 4 --max-running 8 --groups 16 --samples 4 --steps 2 --train-seconds 2".split()
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "two-tier" in result.output and "of bound" in result.output
    content = json.loads((tmp_path / "simulation.json").read_text())
    assert [(one["mode"], one["policy"]) for one in content["outcomes"]] == list(COMBINATIONS)
    assert content["lower_bound_seconds"]["pairs"] < content["lower_bound_seconds"]["steps"]
    assert (tmp_path / "timelines.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


SMALL = "--replicas 2 --max-running 8 --groups 8 --samples 2 --steps 2 --policy histopipe".split()


def test_command_takes_published_step_times(tmp_path):
    summaries = {}
    for model in ("qwen2.5-7b", "qwen2.5-14b"):
        result = CliRunner().invoke(app, ["simulate", *SMALL, "--step-time", model, "--out", str(tmp_path / model)])
        assert result.exit_code == 0, result.output
        summaries[model] = json.loads((tmp_path / model / "simulation.json").read_text())
        assert summaries[model]["settings"]["step_time"] == model
    small, large = (one["lower_bound_seconds"]["steps"] for one in summaries.values())
    assert 1.7 < large / small < 2.1, "as their step times are"


def test_command_names_what_is_wrong(tmp_path):
    bad = tmp_path / "cost.json"
    bad.write_text("{}")
    for arguments, text in (
        (["--policy", "best"], "choose from"),
        (["--trace", str(tmp_path / "none")], "no trace here"),
        (["--step-cost", str(bad)], "running"),
        (["--step-time", "gpt-2", *SMALL], "no published step times of 'gpt-2'"),
        (["--step-time", "qwen2.5-7b", "--step-cost", str(bad)], "--step-time and --step-cost: give one of them"),
    ):
        result = CliRunner().invoke(app, ["simulate", *arguments, "--out", str(tmp_path)])
        assert result.exit_code == 2
        assert text in " ".join(result.output.replace("│", " ").split())
