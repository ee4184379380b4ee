"""Settings and whole-job checks: every error names the full key, or the version, and what to do."""

import dataclasses
import os
from pathlib import Path

import pyarrow
import pytest
import ray
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from pyarrow import parquet

import rhyme_verl
from rhyme_verl.config import KEY, ConfigError, RhymeConfig, load_config
from rhyme_verl.integration.preflight import MANAGER, ROUTER_FILE, JobError, check_runner, prepare_job

ROUTER = str(Path(rhyme_verl.__file__).parent / ROUTER_FILE)


def test_defaults_survive_a_round_trip_through_plain_dicts():
    assert load_config(None) == RhymeConfig() == load_config(dataclasses.asdict(RhymeConfig()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"spek": {}}, [f"{KEY}.spek", "known keys here are spec, history"]),
        ({"spec": {"max_draft": 4}}, [f"{KEY}.spec.max_draft", "max_draft_tokens"]),
        ({"spec": {"max_draft_tokens": "many"}}, [f"{KEY}.spec.max_draft_tokens", "many", "correct its value"]),
        ({"spec": {"max_draft_tokens": 0}}, [f"{KEY}.spec.max_draft_tokens=0", "from 1 to 127"]),
        ({"spec": {"enabled": "perhaps"}}, [f"{KEY}.spec.enabled", "perhaps"]),
        ({"spec": {"max_step_tokens": 0}}, [f"{KEY}.spec.max_step_tokens=0"]),
        ({"spec": {"min_acceptance": 1.5}}, [f"{KEY}.spec.min_acceptance=1.5", "from 0.0 to 1.0"]),
        ({"history": {"window_epochs": -1}}, [f"{KEY}.history.window_epochs=-1"]),
        ({"spec": 3}, [KEY]),
        (7, [KEY, "mapping"]),
    ],
)
def test_a_bad_setting_is_refused_in_one_line_with_its_full_key(settings, words):
    with pytest.raises(ConfigError) as error:
        load_config(settings)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_settings_may_refer_to_the_rest_of_the_jobs_config():
    config = OmegaConf.create({"folder": "/runs/1", "rhyme": {"stats_path": "${folder}/stats"}})
    assert load_config(config.rhyme).stats_path == "/runs/1/stats"
    config.rhyme.stats_path = "${foldre}/stats"
    with pytest.raises(ConfigError, match="foldre"):
        load_config(config.rhyme)


def test_off_may_be_written_without_quotes_in_yaml(tmp_path):
    (tmp_path / "job.yaml").write_text("spec: {async_scheduling: off}")
    assert load_config(OmegaConf.load(tmp_path / "job.yaml")).spec.async_scheduling == "off"


def job(**rollout):
    model = rollout.pop("model", {"path": "Qwen/Qwen2.5-0.5B"})
    trainer = rollout.pop("trainer", {})
    job = {"actor_rollout_ref": {"rollout": {"name": "rhyme", **rollout}, "model": model}, "trainer": trainer}
    return OmegaConf.create(job)


def test_a_good_job_passes_and_other_rollouts_are_not_looked_at():
    prepare_job(job())
    prepare_job(job(custom={"rhyme": {"spec": {"max_draft_tokens": 8}}}))
    prepare_job(job(name="vllm", custom={"rhyme": {"nonsense": 1}}))
    prepare_job(job(engine_kwargs={"vllm": {"async_scheduling": True}}))


def pipe_job(max_age=2, mode="colocate_async", warmup=1, sampler=("drop", 8)):
    """A job whose rollouts HistoPipe schedules."""
    strategy, threshold = sampler
    v1 = {
        "trainer_mode": mode,
        "colocate_async": {"num_warmup_batches": warmup},
        "sampler": {"max_off_policy_strategy": strategy, "max_off_policy_threshold": threshold},
    }
    agent = {"agent_loop_manager_class": MANAGER}
    return job(agent=agent, custom={"rhyme": {"pipe": {"max_age": max_age}}}, trainer={"v1": v1})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (job(custom={"rhyme": {"spec": {"nope": 1}}}), [f"{KEY}.spec.nope"]),
        (
            job(engine_kwargs={"vllm": {"speculative_config": {"method": "ngram"}}}),
            ["engine_kwargs.vllm.speculative_config", f"{KEY}.spec.enabled"],
        ),
        (
            job(engine_kwargs={"vllm": {"worker_extension_cls": "my.Own"}}),
            ["engine_kwargs.vllm.worker_extension_cls", f"{KEY}.spec.enabled"],
        ),
        (
            job(
                engine_kwargs={"vllm": {"async_scheduling": True}},
                custom={"rhyme": {"spec": {"async_scheduling": "off"}}},
            ),
            ["async_scheduling=true", f"set {KEY}.spec.async_scheduling=auto"],
        ),
        (job(mtp={"enable": True, "enable_rollout": True}), ["rollout.mtp.enable_rollout", f"{KEY}.spec.enabled"]),
        (
            job(name="vllm", router_config_path="rhyme_verl/histopipe/router.yaml"),
            ["rollout.router_config_path", "agent_loop_manager_class", MANAGER],
        ),
        (
            job(
                router_config_path=ROUTER,
                agent={"agent_loop_manager_class": MANAGER},
                full_determinism=True,
                custom={"rhyme": {"spec": {"enabled": False}}},
            ),
            ["rollout.router_config_path", "full_determinism"],
        ),
        (job(full_determinism=True), ["rollout.full_determinism=true", f"{KEY}.spec.enabled", "set the latter to"]),
        (job(disaggregation={"enabled": True}), ["rollout.disaggregation.enabled=true", "rollout.name=vllm"]),
        (
            job(disaggregation={"enabled": True}, custom={"rhyme": {"spec": {"enabled": False}}}),
            ["rollout.disaggregation.enabled=true", "rollout.name=vllm"],
        ),
        (job(pipeline_model_parallel_size=2), ["rollout.pipeline_model_parallel_size=2", "set it to 1"]),
        (job(checkpoint_engine={"backend": "delta_sharded"}), ["checkpoint_engine.backend=delta_sharded"]),
        (pipe_job(sampler=("wait", 8)), ["max_off_policy_strategy=wait", "max_off_policy_threshold=null"]),
        (pipe_job(sampler=("drop", 4)), ["max_off_policy_threshold=4", "to 5 or more", f"{KEY}.pipe.max_age"]),
        (pipe_job(max_age=3, sampler=("drop", 6)), ["max_off_policy_threshold=6", "to 7 or more"]),
        (pipe_job(max_age=-1), [f"{KEY}.pipe.max_age=-1 is out of range"]),
        (job(trainer={"use_v1": False}), ["trainer.use_v1=false", "trainer.use_v1=true"]),
        (job(model={"path": "/does/not/exist"}), ["actor_rollout_ref.model.path=/does/not/exist"]),
    ],
)
def test_a_bad_job_is_refused_in_one_line(config, words):
    with pytest.raises(JobError) as error:
        prepare_job(config)
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


def test_a_users_speculative_config_is_fine_while_histospec_is_off():
    prepare_job(
        job(
            engine_kwargs={"vllm": {"speculative_config": {"method": "ngram"}}},
            custom={"rhyme": {"spec": {"enabled": False}}},
        )
    )


def test_one_key_turns_everything_on():
    config = job()
    OmegaConf.set_struct(config, True)
    prepare_job(config)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.agent.agent_loop_manager_class, rollout.router_config_path) == (MANAGER, ROUTER)


def test_a_distillations_teachers_and_a_reward_model_run_with_verls_rollout():
    config = job()
    inference = {"name": "${actor_rollout_ref.rollout.name}"}
    config.distillation = {
        "teacher_models": {"math.v2": {"inference": inference}, "code": {"inference": {"name": "sglang"}}}
    }
    config.reward = {"reward_model": {"rollout": {"name": "${actor_rollout_ref.rollout.name}"}}}
    OmegaConf.set_struct(config, True)
    prepare_job(config)
    teachers = config.distillation.teacher_models
    assert config.reward.reward_model.rollout.name == "vllm"
    assert (teachers["math.v2"].inference.name, teachers.code.inference.name) == ("vllm", "sglang")
    assert config.actor_rollout_ref.rollout.name == "rhyme"


def test_a_job_with_an_agent_loop_manager_of_its_own_keeps_it_and_is_not_scheduled(caplog):
    config = job(agent={"agent_loop_manager_class": "my.Manager"})
    with caplog.at_level("INFO"):
        prepare_job(config)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.agent.agent_loop_manager_class, rollout.get("router_config_path")) == ("my.Manager", None)
    assert caplog.text.count("HistoPipe is off") == 1 and "agent_loop_manager_class=my.Manager" in caplog.text


@pytest.mark.parametrize("name", ["rhyme", "vllm"])
@pytest.mark.parametrize(
    ("settings", "router"),
    [
        ({}, ROUTER),
        ({"router_config_path": "rhyme_verl/histopipe/router.yaml"}, ROUTER),
        ({"router_config_path": "mine.yaml"}, "mine.yaml"),
        ({"custom": {"rhyme": {"pipe": {"enabled": False}}}}, None),
        ({"full_determinism": True, "custom": {"rhyme": {"spec": {"enabled": False}}}}, None),
    ],
)
def test_the_agent_loop_manager_brings_its_router_unless_the_job_says_otherwise(name, settings, router):
    config = job(name=name, agent={"agent_loop_manager_class": MANAGER}, **settings)
    OmegaConf.set_struct(config, True)
    prepare_job(config)
    assert config.actor_rollout_ref.rollout.get("router_config_path") == router


@pytest.mark.parametrize(
    ("max_age", "mode", "warmup", "after", "logged"),
    [
        (2, "colocate_async", 1, 2, "num_warmup_batches is set to 2"),
        (3, "colocate_async", 1, 3, "num_warmup_batches is set to 3"),
        (1, "colocate_async", 1, 1, None),
        (2, "colocate_async", 4, 4, None),
        (3, "colocate_async", 2, 2, "no answer gets older"),
        (2, "sync", 1, 1, None),
    ],
)
def test_verl_submits_as_many_batches_ahead_as_units_take(caplog, max_age, mode, warmup, after, logged):
    config = pipe_job(max_age, mode, warmup, sampler=("drop", 16))
    with caplog.at_level("INFO"):
        prepare_job(config)
    assert config.trainer.v1.colocate_async.num_warmup_batches == after
    assert (logged is None and not caplog.records) or logged in caplog.text


def test_a_number_of_batches_ahead_from_the_command_line_is_kept(caplog):
    given = "trainer.v1.colocate_async.num_warmup_batches=1"
    try:
        with initialize_config_module("verl.trainer.config", version_base=None):
            composed = compose("ppo_trainer", overrides=[given], return_hydra_config=True)
        HydraConfig.instance().set_config(composed)
        config = pipe_job(sampler=("drop", 16))
        prepare_job(config)
    finally:
        HydraConfig.instance().cfg = None
    assert config.trainer.v1.colocate_async.num_warmup_batches == 1
    assert "the job sets 1, so no answer gets older than that" in caplog.text
    config = pipe_job(sampler=("drop", 16))
    prepare_job(config, [f"++{given}"])
    assert config.trainer.v1.colocate_async.num_warmup_batches == 1


@pytest.mark.parametrize("files", [str, lambda path: [str(path)]])
def test_data_with_images_is_warned_of_once_with_its_key(tmp_path, caplog, files):
    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"prompt": ["a"], "images": [["b"]]}), path)
    config = job()
    config.data = {"train_files": files(path), "image_key": "images", "video_key": "videos"}
    prepare_job(config)
    assert caplog.text.count("data.image_key=images") == 1 and "video_key" not in caplog.text
    caplog.clear()
    config.data.image_key = "pictures"
    prepare_job(config)
    assert not caplog.records


@pytest.mark.parametrize("address", [None, "local", "auto"])
def test_a_model_folder_may_be_missing_only_where_a_cluster_runs_the_job(address, caplog):
    config = job()
    config.actor_rollout_ref.model = {"path": "/no/such/policy"}
    config.ray_kwargs = {"ray_init": {"address": address}}
    if address == "auto":
        prepare_job(config)
        assert caplog.text.count("/no/such/policy does not exist on the machine that starts the job") == 1
    else:
        with pytest.raises(JobError, match="/no/such/policy does not exist"):
            prepare_job(config)


class StockRunner:
    pass


class DerivedRunner(StockRunner):
    pass


class OtherRunner:
    pass


def test_only_runners_of_the_v1_trainer_run_jobs_with_rhyme():
    stock, derived, other = map(ray.remote, (StockRunner, DerivedRunner, OtherRunner))
    check_runner(job(), derived, stock)
    check_runner(job(name="vllm"), other, stock)
    with pytest.raises(JobError, match="test_config.OtherRunner does not run verl's V1 trainer.*rollout.name=vllm"):
        check_runner(job(), other, stock)
    with_options = other.options(num_cpus=1)  # verl only calls `remote` on it
    check_runner(job(name="vllm"), with_options, stock)
    with pytest.raises(JobError, match="give run_ppo the Ray actor class itself"):
        check_runner(job(), with_options, stock)


@pytest.mark.parametrize(("strategy", "threshold"), [("drop", 8), ("wait", None), ("drop", 5)])
def test_samplers_that_bound_the_age_no_tighter_are_fine(strategy, threshold):
    prepare_job(pipe_job(sampler=(strategy, threshold)))


def history_of(tmp_path, rhyme, **trainer):
    """Where a job with these settings saves its history, and what it resumes."""
    config = job(custom=None if rhyme is None else {"rhyme": rhyme})
    config.trainer = {"default_local_dir": str(tmp_path), "resume_mode": "auto", "resume_from_path": None, **trainer}
    OmegaConf.set_struct(config, True)
    prepare_job(config)
    history = load_config(config.actor_rollout_ref.rollout.custom.rhyme).history
    return history.snapshot_dir, history.resume_from


@pytest.mark.parametrize("rhyme", [None, {}, {"history": {"window_epochs": 2}}])
def test_history_is_saved_with_verls_checkpoints_and_resumed_with_them(tmp_path, rhyme):
    folder = str(tmp_path)
    assert history_of(tmp_path, rhyme) == (folder, None), "nothing to resume yet"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert history_of(tmp_path, rhyme) == (folder, f"{folder}/global_step_12")
    assert history_of(tmp_path, rhyme, resume_mode="disable") == (folder, None)
    other = {"resume_mode": "resume_path", "resume_from_path": "other/global_step_3"}
    assert history_of(tmp_path, rhyme, **other) == (folder, os.path.abspath("other/global_step_3"))


def test_a_jobs_own_history_is_resumed_and_saved_with_verls_checkpoints_only(tmp_path):
    own = {"history": {"snapshot_dir": str(tmp_path), "resume_from": "/mine/global_step_1"}}
    assert history_of(tmp_path, own) == (str(tmp_path), "/mine/global_step_1")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert history_of(tmp_path, own)[1] == f"{tmp_path}/global_step_12", "its own checkpoint has a newer one"
    with pytest.raises(JobError, match=r"snapshot_dir=/mine is not trainer.default_local_dir=.*leave the former unset"):
        history_of(tmp_path, {"history": {"snapshot_dir": "/mine"}})


@pytest.mark.parametrize(("package", "found"), [("verl", "0.12.0"), ("vllm", "0.19.1")])
def test_an_unsupported_host_is_refused_with_the_versions(monkeypatch, package, found):
    import rhyme_verl.version as version

    installed = version.installed_version
    monkeypatch.setattr(version, "installed_version", lambda name: found if name == package else installed(name))
    with pytest.raises(JobError, match=rf"{package} {found} is not supported .* install {package}[<>]"):
        prepare_job(job())
