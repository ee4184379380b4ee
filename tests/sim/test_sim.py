"""The simulated cluster: exact times of small cases, nothing lost, no bound beaten, ages as each mode has them."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rhyme_verl.cli import app
from rhyme_verl.sim.cluster import Replica, interpolate_step_seconds
from rhyme_verl.sim.experiment import CASES, STOCK, Case, lower_bound, play
from rhyme_verl.sim.trainer import Simulation
from rhyme_verl.sim.workload import LogNormal, from_distribution, from_trace
from tests.helpers.simulation import STEP, STEP_SECONDS, SYNC, random_scenario, scenario_of, sizes, units, workload_of

TRACE = Path(__file__).parents[2] / "benchmarks/traces/quickstart.parquet"


def test_a_replica_slows_down_with_what_it_runs():
    replica = Replica(STEP)
    replica.start(0, 10, 0.0)
    replica.start(1, 4, 2.0)  # sequence 0 has 2 tokens
    assert replica.next_end() == pytest.approx(2.0 + 4 * 1.5)
    assert replica.pop_ended(8.0) == [(1, 2.0)]
    assert replica.next_end() == pytest.approx(8.0 + 4 * 1.0)
    assert replica.pop_ended(12.0) == [(0, 0.0)]
    assert replica.generated_tokens == pytest.approx(14)
    assert replica.sequence_seconds == pytest.approx(18.0)


def test_an_interrupted_sequence_goes_on_where_it_was_after_its_prefix():
    source, target = Replica(STEP), Replica(STEP[:2])
    source.start(7, 10, 0.0)
    source.start(8, 10, 0.0)
    assert source.interrupt(6.0) == [(7, 4, 0.0), (8, 4, 0.0)]
    assert source.next_end() == float("inf")
    target.start(7, 6, 6.0, before=4, recompute=0.5)
    target.start(8, 6, 6.0, before=4, recompute=0.5)
    assert target.next_end() == pytest.approx(6.5 + 6 * 1.0), "there is room for one"
    assert target.stalled_seconds == 0.5
    assert target.interrupt(8.5) == [(7, 6, 6.0), (8, 4, None)]


def test_sync_steps_and_training_take_turns():
    scenario = scenario_of(workload_of([[[100, 200]], [[50, 50]], [[50, 50]]]), replicas=2, train_seconds=3.0)
    outcome, run = play(scenario, SYNC)
    one = STEP_SECONDS[1]
    assert run.trained == pytest.approx([200 * one + 3.0, 250 * one + 6.0, 300 * one + 9.0])
    assert outcome.age_max == 0


def test_one_step_off_rolls_out_while_training():
    scenario = scenario_of(workload_of([[[100]], [[100]], [[100]]]), replicas=1, train_seconds=0.5)
    _, run = play(scenario, Case(mode="one_step_off"))
    assert run.trained == pytest.approx([100 * STEP_SECONDS[1] * k + 0.5 for k in (1, 2, 3)])
    assert run.age[:3].tolist() == [0, 1, 1]


def one_long_answer():
    lengths = np.full((6, 4, 1), 100)
    lengths[0, 0, 0] = 320
    return workload_of(lengths)


def test_separate_trainers_change_weights_in_the_midst_of_answers():
    scenario = scenario_of(one_long_answer(), replicas=2, max_running=4, train_seconds=0.1)
    outcome, run = play(scenario, Case(mode="separate_async"))
    assert run.age[0] == run.trained_in[0] == 3
    assert run.versions_spanned[0] == 4
    assert outcome.recompute_seconds > 0.0
    _, patient = play(replace(scenario, recompute_seconds_per_token=0.0), Case(mode="separate_async"))
    end = max(end for _, answer, _, end in patient.segments if answer == 0)
    assert end == pytest.approx(320 * STEP_SECONDS[1], rel=0.02)


def test_colocated_trainers_stop_the_replicas():
    """While three trainings take a second each, the long answer stands still."""
    scenario = scenario_of(
        one_long_answer(), replicas=2, max_running=4, train_seconds=1.0, recompute_seconds_per_token=0.0
    )
    _, run = play(scenario, STOCK)
    assert run.trained_in[0] == 3 and run.versions_spanned[0] == 4
    end = max(end for _, answer, _, end in run.segments if answer == 0)
    assert end == pytest.approx(3 * 1.0 + 320 * STEP_SECONDS[1], rel=0.01)
    trainings = [(second - 1.0, second) for second in run.trained]
    assert not any(begin + 1e-6 < end < over - 1e-6 for _, _, _, end in run.segments for begin, over in trainings)


def test_a_unit_is_trained_in_two_steps_and_its_slowest_group_is_carried():
    """Groups of one answer; max_age 2, one carried: the long one of the first unit is recomputed once."""
    lengths = np.full((6, 4, 1), 100)
    lengths[0, 1, 0] = 350
    scenario = scenario_of(
        workload_of(lengths), replicas=9, max_running=1, train_seconds=1.0, recompute_seconds_per_token=0.01
    )
    outcome, run = play(scenario, units(2, 2, 1))
    one = STEP_SECONDS[1]
    first = 100 * one
    assert run.trained[:2] == pytest.approx([first + 1.0, first + 2.0])
    assert run.trained_in[1] == 2 and run.age[1] == 2 and run.versions_spanned[1] == 2
    assert sum(replica.stalled_seconds for replica in run.replicas) == pytest.approx(0.01 * 100)
    assert run.trained[2] == pytest.approx(first + 2.0 + 0.01 * 100 + 250 * one + 1.0), "it is waited for"
    assert outcome.age_max <= 2


def test_the_oldest_unit_comes_first_and_of_it_the_longest():
    scenario = scenario_of(workload_of([[[10], [20]], [[30], [40]], [[30], [40]]]), replicas=1, max_running=1)
    _, run = play(scenario, Case(mode="separate_async", system="histopipe"))
    assert [answer for _, answer, _, _ in run.segments][:3] == [1, 0, 3]


@settings(max_examples=40, deadline=None)
@given(sizes, st.sampled_from([case for case in CASES if case.mode in ("sync", "one_step_off")]))
def test_a_barrier_never_beats_the_lower_bound(size, case):
    scenario = random_scenario(size)
    _, run = play(scenario, case)
    assert run.now >= lower_bound(scenario, case) * len(run.trained) * (1 - 1e-9)


def test_drafting_makes_everything_faster_by_its_factor():
    workload = from_distribution(LogNormal(), steps=6, groups=16, samples=4)
    for case in (SYNC, units(2)):
        plain, drafted = (
            play(scenario_of(workload, tokens_per_step=factor, recompute_seconds_per_token=0.0), case)[0]
            for factor in (1.0, 2.0)
        )
        assert drafted.steps_per_hour == pytest.approx(2 * plain.steps_per_hour, rel=0.02)


def test_units_are_as_fast_as_verls_partial_rollout_and_their_answers_are_younger():
    """An eighth of the stated cluster: 8 replicas of 128 lanes, 64 groups of 16, median 2,000, p99 eight times that."""
    workload = from_distribution(LogNormal(within_group=0.257, epoch_noise=0.0244), steps=12, groups=64, samples=16)
    scenario = scenario_of(workload, replicas=8, max_running=128)
    stock, ours, nothing_interrupted = (play(scenario, case)[0] for case in (STOCK, units(2), units(1)))
    assert ours.steps_per_hour >= 0.9 * stock.steps_per_hour
    assert ours.age_max == 2 and ours.mixed < 0.1 < stock.mixed
    assert nothing_interrupted.age_max == 1 and nothing_interrupted.mixed == 0.0
    assert nothing_interrupted.steps_per_hour >= 1.4 * play(scenario, SYNC)[0].steps_per_hour


@pytest.mark.slow
@pytest.mark.parametrize(("tail", "cap"), [(8.0, 2048), (3.0, 2048), (8.0, 4096), (8.0, 16384), (3.0, 16384)])
def test_a_barrier_is_reached_no_later_than_by_verls_default(tail, cap):
    workload = from_distribution(LogNormal(p99_over_median=tail, cap=cap), steps=3, groups=256, samples=16)
    scenario = scenario_of(workload, replicas=32, max_running=128)
    default, predicted, perfect = (
        play(scenario, Case(mode="sync", system=system))[0].steps_per_hour
        for system in ("verl", "histopipe", "perfect")
    )
    assert predicted >= 0.999 * default and perfect >= 0.999 * default


def test_a_trace_is_played():
    workload = from_trace(TRACE, cap=400, scale=40.0, repeat=2)
    assert workload.lengths.shape == (4, 32, 8)
    assert workload.lengths.max() <= 16000
    assert workload.rank_correlation > 0.9
    outcome, _ = play(scenario_of(workload, steps=24), units(2))
    assert 0.3 < outcome.of_bound <= 1.01, "the bound is an average over all steps, the outcome one over the later ones"


def test_the_complete_part_of_a_trace_is_played(tmp_path):
    """verl drops the rest of an epoch, other prompts each time, and a job may end within a step."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from rhyme_verl.telemetry.trace import read_trace, write_trace

    table = read_trace(TRACE)
    keys, steps = table.column("prompt_key").unique().to_pylist(), table.column("step").to_numpy()
    two = pc.is_in(table.column("prompt_key"), pa.array(keys[:2], pa.uint64()))
    without = pc.and_(two, pc.equal(table.column("epoch"), 2))
    half = pc.and_(pc.equal(table.column("step"), int(steps.max())), pc.greater(table.column("sample"), 3))
    write_trace(tmp_path / "part.parquet", table.filter(pc.invert(pc.or_(without, half))))
    whole, part = from_trace(TRACE), from_trace(tmp_path / "part.parquet")
    assert part.lengths.shape[2] == whole.lengths.shape[2] == 8
    assert part.lengths.shape[1] <= whole.lengths.shape[1]
    assert whole.lengths.size / 2 <= part.lengths.size < whole.lengths.size


def test_answers_of_a_group_that_end_under_different_weights_stay_together(tmp_path):
    import pyarrow as pa

    from rhyme_verl.telemetry.trace import read_trace, write_trace

    table = read_trace(TRACE)
    late = (table.column("sample").to_numpy() > 5).astype(np.int32)
    index = table.schema.get_field_index("step")
    steps = pa.array(table.column("step").to_numpy() + late, pa.int32())
    write_trace(tmp_path / "carried.parquet", table.set_column(index, table.schema.field("step"), steps))
    whole, carried = from_trace(TRACE), from_trace(tmp_path / "carried.parquet")
    assert sorted(carried.lengths.ravel()) == sorted(whole.lengths.ravel())


def test_a_trace_of_one_epoch_is_refused(tmp_path):
    import pyarrow.compute as pc

    from rhyme_verl.telemetry.trace import read_trace, write_trace

    table = read_trace(TRACE)
    write_trace(tmp_path / "one.parquet", table.filter(pc.equal(table.column("epoch"), 1)))
    with pytest.raises(ValueError, match="two epochs or more"):
        from_trace(tmp_path / "one.parquet")


def test_lengths_are_drawn_as_stated():
    distribution = LogNormal(median=500.0, p99_over_median=4.0, cap=100000)
    lengths = distribution.sample(np.random.default_rng(0), 4000, 8, 1)
    assert np.median(lengths) == pytest.approx(500, rel=0.03)
    assert np.percentile(lengths, 99) == pytest.approx(2000, rel=0.1)


def test_a_system_that_leaves_groups_behind_is_noticed():
    class Idle:
        def submit(self, groups):
            pass

    simulation = Simulation(scenario_of(workload_of([[[10]]])), "sync")
    simulation.system = Idle()
    with pytest.raises(RuntimeError, match="left groups behind"):
        simulation.run()


def test_step_costs_are_interpolated_and_grow_proportionally_beyond_the_last_point():
    cost = interpolate_step_seconds([1, 4], [0.010, 0.016], 8)
    assert cost.tolist() == pytest.approx([0.01, 0.01, 0.012, 0.014, 0.016, 0.02, 0.024, 0.028, 0.032])


def test_unknown_systems_are_refused():
    with pytest.raises(ValueError, match="'defualt' is not known"):
        play(scenario_of(workload_of([[[10]]])), Case(mode="sync", system="defualt"))


def test_command_writes_a_table_and_a_result(tmp_path):
    arguments = "simulate --replicas 4 --max-running 8 --groups 16 --samples 4 --steps 6 --train-seconds 2".split()
    result = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "two-tier" in result.output and "of bound" in result.output
    content = json.loads((tmp_path / "simulation.json").read_text())
    assert [one["case"] for one in content["outcomes"]] == [case.name for case in CASES]


SMALL = "--replicas 2 --max-running 8 --groups 8 --samples 2 --steps 6 --system histopipe".split()


def test_command_takes_published_step_times(tmp_path):
    summaries = {}
    for model in ("qwen2.5-7b", "qwen2.5-14b"):
        result = CliRunner().invoke(app, ["simulate", *SMALL, "--step-time", model, "--out", str(tmp_path / model)])
        assert result.exit_code == 0, result.output
        summaries[model] = json.loads((tmp_path / model / "simulation.json").read_text())
        assert summaries[model]["settings"]["step_time"] == model
    small, large = (one["outcomes"][0]["steps_per_hour"] for one in summaries.values())
    assert 1.7 < small / large < 2.1, "as their step times are"


def test_command_names_what_is_wrong(tmp_path):
    for arguments, text in (
        (["--system", "best"], "choose from"),
        (["--trace", str(tmp_path / "none")], "no trace here"),
        (["--step-time", "gpt-2", *SMALL], "no published step times of 'gpt-2'"),
    ):
        result = CliRunner().invoke(app, ["simulate", *arguments, "--out", str(tmp_path)])
        assert result.exit_code == 2
        assert text in " ".join(result.output.replace("│", " ").split())
