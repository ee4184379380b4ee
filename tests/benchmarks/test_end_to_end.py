"""What the end-to-end benchmark makes of the records of its jobs, on numbers small enough to check by hand."""

import json
import statistics

import pytest
import typer

from benchmarks.engines.best_suffix import best_suffix, suffix_config
from benchmarks.jobs.cases import REPLICAS, WORKLOADS, cases, suffix_rows
from benchmarks.jobs.emulated_clock import EmulatedTime
from benchmarks.jobs.end_to_end import (
    _finished,
    emulated_between,
    host_time,
    is_asynchronous,
    most_charged,
    result_name,
)
from benchmarks.jobs.job_figures import STOCK, bars_of, baseline, figures_by_round, figures_of, summarize, table

COUNTS = vars(EmulatedTime())
REWARDS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)


def emulated(**counts):
    return dict.fromkeys(COUNTS, 0) | counts


def run(rollout_seconds, case=STOCK, number=1, host_seconds=0.0, **counts):
    steps = [
        {
            "rollout_seconds": seconds, "host_seconds": host_seconds, "step_seconds": 5.0, "tokens": 100,
            "reward": reward, "probs_correlation": 0.999, "largest_probs_difference": 1e-5, "bubble": 0.5,
            "requests": 8, "staleness_worst_mean": age / 2, "staleness_worst_max": age, "spanning_share": 0.25 * age,
        }
        for seconds, reward, age in zip(rollout_seconds, REWARDS, (0, 0, 0, 1) * 2, strict=True)
    ]  # fmt: skip
    one = emulated(steps=100, seconds=50.0, host_seconds=host_seconds, **counts)
    found = {"round": number, "case": case, "steps": steps, "measured": {"bubble": 0.5}, "emulated": [one] * 8}
    return {**found, "asynchronous": False}


def test_figures_are_in_emulated_seconds_from_epoch_2_on():
    figures = figures_of(
        run((10, 6, 6, 6, 12, 12, 6, 6), verifies=10, drafted=30, accepted=20, late_steps=2), 2.0, trainer_seconds=1.0
    )
    assert figures["rollout_seconds_mean"] == 4.5
    assert figures["rollout_seconds_quartiles"] == [3.0, 4.5, 6.0]
    assert figures["first_epoch_rollout_seconds"] == 3.5
    assert figures["steps_per_hour"] == 3600 / 5.5
    assert (figures["tokens_per_s"], figures["generated_tokens"]) == (400 / 18, 4 * (8 + 10 + 20))
    assert (figures["accepted_per_verify"], figures["drafted_per_verify"]) == (2.0, 3.0)
    assert (figures["age_max"], figures["age_mean"]) == (1, pytest.approx(1 / 8))
    assert figures["mixed_share"] == pytest.approx(0.25 / 4)
    assert figures["reward_by_quarter"] == pytest.approx([0.05, 0.25, 0.45, 0.65])
    assert (figures["late_step_share"], figures["is_valid"]) == (0.02, True)
    epochs = figures["epochs"]
    assert epochs["rollout_seconds"] == [3.5, 4.5]
    assert epochs["reward"] == pytest.approx([statistics.mean(REWARDS[:4]), statistics.mean(REWARDS[4:])])
    assert (epochs["age_max"], epochs["accepted_per_verify"]) == ([1, 1], [2.0, 2.0])


def test_results_are_also_given_without_the_charged_host_time():
    runs = [run([8.0] * 8), run([5.0] * 8, case="sync rhyme", host_seconds=1.0)]
    found = summarize(figures_by_round(runs, dilation=2.0))
    stock, rhyme = found[STOCK], found["sync rhyme"]
    training = 0.15 * 4.0
    assert (rhyme["rollout_seconds_mean"], rhyme["device_only"]["rollout_seconds_mean"]) == (2.5, 2.0)
    assert (rhyme["tokens_per_s"], rhyme["device_only"]["tokens_per_s"]) == (40.0, 50.0)
    assert rhyme["steps_per_hour_ratio"] == pytest.approx((4.0 + training) / (2.5 + training))
    assert rhyme["device_only"]["steps_per_hour_ratio"] == pytest.approx((4.0 + training) / (2.0 + training))
    assert rhyme["host_share"] == 1 / 50
    assert stock["device_only"]["rollout_seconds_mean"] == stock["rollout_seconds_mean"] == 4.0
    assert stock["device_only"]["steps_per_hour_ratio"] == 1.0
    row = [list(column.cells)[1] for column in table(found, "jobs").columns]
    assert row[:2] == ["sync rhyme", "1"]
    assert row[6:10] == ["2.0%", "2.00", f"{3600 / (2.0 + training):.0f}", f"{4.6 / 2.6:.2f}"]


def test_ratios_are_taken_within_a_round_with_one_trainer_time():
    runs = []
    for number, seconds in ((1, 8.0), (2, 16.0), (3, 24.0)):
        runs.append(run([seconds] * 8, number=number))
        runs.append(run([seconds / 2] * 8, case="sync rhyme", number=number, late_steps=3 * number))
    by_case = figures_by_round(runs, dilation=2.0)
    summary, bars = summarize(by_case), bars_of(by_case)
    # Stock takes 4 + .6 emulated seconds in the first round, rhyme 2 + .6; the others are the same but for scale.
    assert summary["sync rhyme"]["steps_per_hour_ratio"] == pytest.approx(4.6 / 2.6)
    assert summary[STOCK]["steps_per_hour_ratio"] == 1.0
    assert summary["sync rhyme"]["rollout_seconds_mean"] == 4.0
    assert summary["sync rhyme"]["epochs"]["rollout_seconds"] == [4.0, 4.0]
    assert summary["sync rhyme"]["is_valid"] is False  # one round is late in too many steps
    assert summary[STOCK]["is_valid"] is True
    assert bars["sync rhyme / sync stock: rollout speed"]["measured"] == 2.0
    assert bars["sync rhyme / sync stock: rollout speed in epoch 1, worst round"]["measured"] == 2.0
    assert bars["sync rhyme / sync stock: rollout speed from epoch 2 on"]["target"] == ">= 0.98"
    (equal_rewards,) = (one for name, one in bars.items() if "equal last rewards" in name)
    assert equal_rewards["measured"] == 1.0
    missed = [name for name, one in bars.items() if not one["holds"]]
    assert missed == ["sync rhyme / sync stock: rollout speed"]  # 2.0 of 2.3
    assert all(one["holds"] for one in bars_of(by_case, "end_to_end_256").values())


def test_cases_with_gpus_for_the_trainer_can_be_compared_alone():
    runs = [run([8.0] * 8, case="separate stock"), run([4.0] * 8, case="separate rhyme")]
    summary = summarize(figures_by_round(runs, dilation=2.0))
    assert summary["separate rhyme"]["steps_per_hour_ratio"] == 2.0  # nothing waits for training
    assert baseline(["separate rhyme", "sync rhyme"]) == STOCK


def test_verls_modes_with_older_answers_are_compared_apart():
    seconds = {STOCK: 8.0, "colocate rhyme": 2.0, "colocate stock": 3.0, "colocate wait 2": 4.0}
    runs = [run([value] * 8, case=case) for case, value in seconds.items()]
    for step in runs[2]["steps"]:
        step["staleness_worst_max"] = 7
    bars = bars_of(figures_by_round(runs, dilation=1.0))
    training = 0.15 * 8.0
    for mode, value in (("mode", 3.0), ("mode with age <= 2", 4.0)):
        measured = bars[f"colocate rhyme / verl's fastest {mode}: steps/h"]["measured"]
        assert measured == pytest.approx((value + training) / (2.0 + training))


@pytest.mark.parametrize(("difference", "holds"), [(1e-5, True), (1e-3, False)])
def test_one_wrong_probability_fails_the_bar(difference, holds):
    case = "sync rhyme"
    one = run([8.0] * 8, case=case)
    one["steps"][3]["largest_probs_difference"] = difference
    bars = bars_of(figures_by_round([run([8.0] * 8), one], dilation=2.0))
    assert bars[f"{case}: largest difference of a token's probability"]["holds"] is holds


def test_emulations_are_summed_between_two_moments(tmp_path):
    lines = [{"time": float(at), **emulated(steps=50 * at, accepted=at * at)} for at in (1, 2, 3)]
    paths = [tmp_path / f"emulation-{replica}.jsonl" for replica in range(2)]
    for path in paths:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    found = emulated_between(paths, 2.5, 3.0)
    assert (found["steps"], found["accepted"]) == (2 * 50, 2 * 5)
    assert emulated_between(paths, 0.0, 2.0)["steps"] == 2 * 100


def test_the_most_charged_replica_counts_for_device_only_times(tmp_path):
    paths = [tmp_path / f"emulation-{replica}.jsonl" for replica in range(2)]
    for path, charged in zip(paths, (1.0, 3.0), strict=True):
        lines = [{"time": float(at), "asynchronous": True, **emulated(host_seconds=charged * at)} for at in (1, 2, 4)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert most_charged(paths, 1.5, 4.0) == 3.0 * (4 - 1)
    assert is_asynchronous(paths)
    paths[0].write_text(json.dumps({"time": 1.0, "asynchronous": False, **emulated()}) + "\n", encoding="utf-8")
    assert not is_asynchronous(paths)


def test_results_without_host_time_are_not_continued(tmp_path):
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"dilation": 2.0, "runs": []}), encoding="utf-8")
    assert _finished(path, {"dilation": 2.0}) == []
    with pytest.raises(typer.BadParameter, match="another host_time"):
        _finished(path, {"dilation": 2.0, "host_time": host_time()})


def test_suffix_runs_at_its_defaults_and_at_its_best_in_the_replay(tmp_path):
    played = {"arctic tuned": {"64": {"settings": {"num_speculative_tokens": 16, "max_tree_depth": 64}}}}
    path = tmp_path / "drafter.json"
    path.write_text(json.dumps({"traces": {"longtail": played}}), encoding="utf-8")
    best = best_suffix("longtail", 64, path)
    assert best == {"method": "suffix", "num_speculative_tokens": 16, "suffix_decoding_max_tree_depth": 64}
    assert suffix_config({}) == {"method": "suffix", "num_speculative_tokens": 32}
    arguments = cases({"colocate": best})["colocate suffix best"].job("qwen2.5-7b,3", 5).arguments(tmp_path)
    config = "{method:suffix,num_speculative_tokens:16,suffix_decoding_max_tree_depth:64}"
    assert f"+actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config={config}" in arguments
    assert "actor_rollout_ref.rollout.name=vllm" in arguments
    played["arctic tuned"]["4"] = {"settings": {}}
    path.write_text(json.dumps({"traces": {"longtail": played}}), encoding="utf-8")
    assert [best_suffix("longtail", rows, path) == best for rows in (1, 15, 17, 256)] == [False, False, True, True]
    with pytest.raises(ValueError, match="drafter.json"):
        best_suffix("gsm8k", 64, path)
    with pytest.raises(ValueError, match="no-such.json"):
        best_suffix("longtail", 64, tmp_path / "no-such.json")


def test_each_workload_has_a_result_of_its_own():
    assert (result_name(), result_name("gsm8k-noisy")) == ("end_to_end", "end_to_end_gsm8k_noisy")
    assert result_name(lanes=256) == "end_to_end_256"
    assert result_name("gsm8k", dilation=0.0) == "end_to_end_gsm8k_own_speed"


def test_without_emulation_no_time_is_charged():
    runs = [run([8.0] * 8), run([5.0] * 8, case="sync rhyme")]
    for one in runs:
        one["emulated"], one["asynchronous"] = [emulated_between([], 0.0, 1.0)] * 8, None
        assert most_charged([], 0.0, 1.0) == 0.0
    rhyme = summarize(figures_by_round(runs, dilation=1.0))["sync rhyme"]
    assert (rhyme["rollout_seconds_mean"], rhyme["host_share"], rhyme["asynchronous"]) == (5.0, 0.0, None)
    assert (rhyme["raw_step_seconds"], rhyme["tokens_per_s"]) == (5.0, 20.0)
    assert rhyme["device_only"]["rollout_seconds_mean"] == 5.0


def test_every_case_is_accepted_by_hydra_verl_and_rhyme(tmp_path, monkeypatch):
    pytest.importorskip("verl")
    from hydra import compose, initialize_config_dir

    from recipes.check import check

    monkeypatch.setenv("RHYME_BENCH_TIMES", str(tmp_path))
    known = cases(dict.fromkeys(suffix_rows(128), suffix_config({})))
    pairs = [(name, workload) for name in ("sync stock", "sync suffix best", "sync rhyme") for workload in WORKLOADS]
    for name, kind in {*pairs, *((name, "longtail") for name in known)}:
        case, workload = known[name], WORKLOADS[kind]
        emulation = "" if workload.trace == "gsm8k" else "qwen2.5-7b,3"
        arguments = case.job(emulation, 5, workload, lanes=128).arguments(tmp_path)
        folder, file = (
            next(one.partition("=")[2] for one in arguments if one.startswith(options))
            for options in (("--config-dir", "--config-path"), "--config-name")
        )
        overrides = [one for one in arguments if not one.startswith(("--config", "hydra."))]
        overrides.append("hydra.searchpath=[pkg://verl.trainer.config]")
        with initialize_config_dir(folder, version_base=None):
            config = compose(file, overrides=overrides)
        check(config)
        replaced = any("worker_extension_cls" in one for one in arguments)  # by the CPU platform's
        assert replaced == (case.rollout == "vllm" and not emulation)
        modes = {"sync": "sync", "colocate": "colocate_async", "separate": "separate_async"}
        assert config.trainer.v1.trainer_mode == modes[name.split()[0].removesuffix(",")]
        rollout = config.actor_rollout_ref.rollout
        assert rollout.max_model_len > config.data.max_prompt_length + config.data.max_response_length
        assert rollout.max_num_seqs == 128
        assert rollout.max_num_seqs * REPLICAS == config.data.train_batch_size * 8  # one wave
