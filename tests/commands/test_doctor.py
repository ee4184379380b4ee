"""`rhyme doctor` finds planted faults, each with its name and what to do, and finds none in a sound job."""

import json
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from typer.testing import CliRunner

from rhyme_verl.cli import app
from rhyme_verl.commands.doctor import installation
from rhyme_verl.commands.doctor.finding import Verdict
from rhyme_verl.commands.doctor.installation import check_installation
from rhyme_verl.commands.doctor.job import ENVIRONMENT, check_config, compose_job, environment_of
from rhyme_verl.config import ConfigError
from rhyme_verl.integration.preflight import MANAGER, MANAGER_KEY, ROUTER_FILE
from rhyme_verl.telemetry.rollout_stats import RolloutStats

ROOT = Path(__file__).parents[2]
CPU = {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "VLLM_CPU_KVCACHE_SPACE": "1"}
ROLLOUT = "actor_rollout_ref.rollout"
RHYME = f"{ROLLOUT}.custom.rhyme"


@pytest.fixture(scope="module")
def quickstart():
    return compose_job(ROOT / "examples/quickstart", "quickstart", [])


def faults(findings):
    return [(one.text, one.remedy) for one in findings if one.verdict is Verdict.FAULT]


def metadata(folder, name, version, entry_points=None):
    """Plant an installed distribution that is found before the real one."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    if entry_points:
        (info / "entry_points.txt").write_text(entry_points)


def test_a_sound_environment_has_no_faults():
    assert faults(check_installation(CPU)) == []


def plant_old_vllm(monkeypatch, folder):
    metadata(folder, "vllm", "0.19.1")
    return CPU


def plant_missing_entry_points(monkeypatch, folder):
    metadata(folder, "rhyme_verl", "0.1.0", "[console_scripts]\nrhyme = rhyme_verl.cli:app\n")
    return CPU


def plant_broken_core(monkeypatch, folder):
    for name in [name for name in sys.modules if name.startswith("rhyme_verl.histospec")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rhyme_verl._core", None)
    return CPU


def plant_no_platform(monkeypatch, folder):
    monkeypatch.setattr(installation, "GPU_DEVICE", folder)
    return {}


def plant_no_engine_device(monkeypatch, folder):
    return {"VERL_PLATFORM": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.mark.parametrize(
    ("plant", "found", "remedy"),
    [
        (plant_old_vllm, "vllm 0.19.1 is not supported", "install vllm"),
        (
            plant_missing_entry_points,
            "verl.plugins does not name rhyme_verl.integration.plugin",
            "install rhyme_verl again",
        ),
        (plant_broken_core, "does not load or is out of date", "C++ compiler"),
        (plant_no_platform, "VERL_PLATFORM is not cpu", "export VERL_PLATFORM=cpu"),
        (plant_no_engine_device, "without VERL_ENGINE_DEVICE=cuda", "export VERL_ENGINE_DEVICE=cuda"),
    ],
)
def test_a_fault_of_the_environment_is_found(plant, found, remedy, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    environment = plant(monkeypatch, tmp_path)
    assert any(found in text and remedy in what for text, what in faults(check_installation(environment)))


def test_a_cpu_without_variables_is_no_fault(monkeypatch, tmp_path):
    monkeypatch.setattr(installation, "GPU_DEVICE", tmp_path / "none")
    assert faults(check_installation({})) == []


def test_a_sound_job_has_no_faults(quickstart):
    before = OmegaConf.to_yaml(quickstart)
    assert faults(check_config(quickstart, CPU)) == []
    assert OmegaConf.to_yaml(quickstart) == before


@pytest.mark.parametrize(
    ("key", "value", "found", "remedy"),
    [
        (f"{RHYME}.spec.max_draft", 4, f"{RHYME}.spec.max_draft", "max_draft_tokens"),
        (f"{RHYME}.stats_path", f"{__file__}/stats", "is not a folder", "give a folder"),
        (
            f"{ROLLOUT}.engine_kwargs.vllm.speculative_config",
            {"method": "ngram"},
            "both enable speculative decoding",
            "remove the former",
        ),
        ("actor_rollout_ref.model.path", "/no/such/policy", "/no/such/policy does not exist", "give a model folder"),
        (f"{ROLLOUT}.free_cache_engine", True, "the job's settings need a GPU", f"{ROLLOUT}.free_cache_engine=false"),
        (f"{ROLLOUT}.engine_kwargs.vllm.worker_extension_cls", "my.Own", "worker_extension_cls", "remove the former"),
        (
            f"{ROLLOUT}.engine_kwargs.vllm.logits_processors",
            ["my:Own"],
            "logits_processors conflicts",
            "remove the former",
        ),
        ("trainer.use_v1", False, "trainer.use_v1=false", "set trainer.use_v1=true"),
    ],
)
def test_a_fault_of_the_job_is_found(quickstart, key, value, found, remedy):
    config = quickstart.copy()
    OmegaConf.update(config, key, value, force_add=True)
    (only,) = faults(check_config(config, CPU))
    assert found in " ".join(only) and remedy in " ".join(only)


def test_installed_logits_processors_that_vllm_would_leave_out_are_a_fault(quickstart, monkeypatch, tmp_path):
    plugin = tmp_path / "plugin-1.0.dist-info"
    plugin.mkdir()
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin\nVersion: 1.0\n")
    (plugin / "entry_points.txt").write_text("[vllm.logits_processors]\nmine = my:Own\n")
    monkeypatch.syspath_prepend(tmp_path)
    ((problem, remedy),) = faults(check_config(quickstart, CPU))
    assert "['mine']" in problem and "vllm.logits_processors" in problem and "remove the former" in remedy
    config = quickstart.copy()
    OmegaConf.update(config, f"{RHYME}.spec.enabled", False, force_add=True)
    assert faults(check_config(config, CPU)) == []


def test_a_job_that_names_nothing_but_the_router_is_judged_as_it_is_when_it_starts(quickstart):
    config = quickstart.copy()
    OmegaConf.update(config, ROLLOUT, {"name": "vllm", "router_config_path": f"/somewhere/{ROUTER_FILE}"})
    ((problem, remedy),) = faults(check_config(config, CPU))
    assert "needs rhyme_verl's agent-loop manager" in problem and MANAGER in remedy


def test_a_trace_needs_the_agent_loop_manager(quickstart):
    config = quickstart.copy()
    OmegaConf.update(config, f"{RHYME}.trace.path", "trace", force_add=True)
    OmegaConf.update(config, MANAGER_KEY, "my.Manager", force_add=True)
    ((problem, remedy),) = faults(check_config(config, CPU))
    assert f"{RHYME}.trace.path is set" in problem and remedy == f"unset {MANAGER_KEY}"


def test_verls_fault_at_its_default_logging_level_is_found(quickstart):
    config = quickstart.copy()
    OmegaConf.update(config, "trainer.v1.trainer_mode", "separate_async")
    OmegaConf.update(config, "actor_rollout_ref.hybrid_engine", False)
    ((problem, remedy),) = faults(check_config(config, CPU))
    assert "logging level" in problem and "VERL_LOGGING_LEVEL=WARNING" in remedy
    assert len(faults(check_config(config, CPU | {"VERL_LOGGING_LEVEL": "DEBUG"}))) == 1
    exported = CPU | {"VERL_LOGGING_LEVEL": "WARNING"}
    assert faults(check_config(config, exported)) == []
    assert len(faults(check_config(config, exported, on_cluster=True))) == 1, "its processes do not get it"
    OmegaConf.update(config, f"{ENVIRONMENT}.VERL_LOGGING_LEVEL", "WARNING", force_add=True)
    assert faults(check_config(config, CPU)) == faults(check_config(config, CPU, on_cluster=True)) == []
    assert environment_of(config) == {"VERL_LOGGING_LEVEL": "WARNING"}


def test_what_may_be_meant_is_a_note(quickstart):
    config = quickstart.copy()
    config.trainer.total_epochs = 1
    notes = [one for one in check_config(config, CPU) if one.verdict is Verdict.NOTE]
    assert any("no prompt is repeated" in one.text for one in notes)
    config[ROLLOUT.split(".")[0]].rollout.name = "vllm"
    (only,) = check_config(config, CPU)
    assert only.verdict is Verdict.NOTE and f"{ROLLOUT}.name=rhyme" in only.remedy


def test_a_relative_checkpoint_folder_on_a_cluster_is_a_note(quickstart):
    config = quickstart.copy()
    config.trainer.default_local_dir = "checkpoints"
    assert not [one for one in check_config(config, CPU) if one.verdict is Verdict.NOTE]
    OmegaConf.update(config, f"{RHYME}.stats_path", "stats", force_add=True)
    for found in (check_config(config, CPU | {"RAY_ADDRESS": "auto"}), check_config(config, CPU, on_cluster=True)):
        stats, only = [one for one in found if one.verdict is Verdict.NOTE]
        assert "stats_path=stats is relative" in stats.text
        assert "neither saved nor resumed" in only.text and "absolute" in only.remedy


def test_a_jobs_own_search_path_is_kept(tmp_path):
    (tmp_path / "groups/data").mkdir(parents=True)
    (tmp_path / "groups/data/mine.yaml").write_text("# @package _global_\ndata:\n  seed: 77\n")
    job = tmp_path / "job.yaml"
    lines = [
        "defaults: [ppo_trainer, _self_, data@_global_: mine]",
        "hydra:",
        f"  searchpath: [file://{tmp_path}/groups]",
    ]
    job.write_text("\n".join(lines))
    assert compose_job(tmp_path, "job", []).data.seed == 77
    job.write_text(lines[0])
    assert compose_job(tmp_path, "job", [f"hydra.searchpath=[file://{tmp_path}/groups]"]).data.seed == 77


@pytest.mark.parametrize(("value", "is_fault"), [("none", True), ("other", True), ("auto", False), ("a, rhyme", False)])
def test_plugins_that_verl_does_not_load_are_a_fault(value, is_fault):
    found = faults(check_installation(CPU | {"VERL_USE_EXTERNAL_PLUGINS": value}))
    assert [remedy.startswith("add rhyme to") for _, remedy in found] == [True] * is_fault


def write_config(folder, **content):
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder)


def notes_on_a_gpu(config):
    return [one for one in check_config(config, {}) if one.verdict is Verdict.NOTE]


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model_type": "qwen3_5", "text_config": {"layer_types": ["linear_attention", "full_attention"]}}, "a state"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "a state"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "multi-head latent attention"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, None),
    ],
)
def test_what_drafting_costs_with_a_model_is_a_note(quickstart, tmp_path, model, words):
    config = quickstart.copy()
    OmegaConf.update(config, "actor_rollout_ref.model.path", write_config(tmp_path, **model))
    found = [one for one in notes_on_a_gpu(config) if one.check == "model"]
    assert len(found) == (words is not None)
    assert all(words in one.text for one in found)
    OmegaConf.update(config, f"{RHYME}.spec.enabled", False, force_add=True)
    assert not [one for one in notes_on_a_gpu(config) if one.check == "model"]


@pytest.mark.parametrize("given", [{"cudagraph_mode": "FULL_DECODE_ONLY"}, '{"cudagraph_mode": "full_decode_only"}'])
def test_graphs_for_undrafted_steps_only_are_a_note(quickstart, given):
    config = quickstart.copy()
    for mode in ("FULL_AND_PIECEWISE", "FULL", "PIECEWISE"):
        named = {"cudagraph_mode": mode}
        OmegaConf.update(config, f"{ROLLOUT}.engine_kwargs.vllm.compilation_config", named, force_add=True)
        assert not [one for one in notes_on_a_gpu(config) if one.check == "CUDA graphs"]
    OmegaConf.update(config, f"{ROLLOUT}.engine_kwargs.vllm.compilation_config", given, force_add=True, merge=False)
    (only,) = [one for one in notes_on_a_gpu(config) if one.check == "CUDA graphs"]
    assert "piecewise" in only.remedy


def test_a_run_whose_drafter_failed_is_a_fault(quickstart, tmp_path):
    config = quickstart.copy()
    OmegaConf.update(config, f"{RHYME}.stats_path", str(tmp_path), force_add=True)
    for replica, off in enumerate((0.0, 1.0)):
        stats = RolloutStats(str(tmp_path), replica)
        for step in range(2):
            stats.add_tokens(10, is_new_answer=True)
            stats.flush(step, {"num_drafts": 3, "drafting_off": off * step})
    with open(tmp_path / "replica-0.jsonl", "a") as file:
        file.write('{"step": 2, "dra')  # it is running
    ((problem, remedy),) = faults(check_config(config, CPU))
    assert "HistoSpec failed in replica-1 and was off at step 1" in problem and "report it" in remedy


def test_overrides_that_do_not_compose_are_told_in_one_line():
    with pytest.raises(ConfigError, match="does not compose.*rollout.no_such_key"):
        compose_job(None, "ppo_trainer", [f"{ROLLOUT}.no_such_key=1"])


def test_the_command_takes_a_jobs_own_arguments_and_its_exit_code_tells(monkeypatch, tmp_path):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    job = ["doctor", "--quick", "--config-dir", str(ROOT / "examples/quickstart"), "--config-name", "quickstart"]
    sound = CliRunner().invoke(app, job)
    assert sound.exit_code == 0, sound.output
    assert "no faults" in sound.output
    as_a_recipe = ["--config-path" if one == "--config-dir" else one for one in job]
    assert CliRunner().invoke(app, as_a_recipe).exit_code == 0
    broken = CliRunner().invoke(app, [*job, f"+{RHYME}.spec.policy=fast"])
    assert broken.exit_code == 1
    assert "choose from cost_aware, fixed" in broken.output
    saved = tmp_path / "config.yaml"
    OmegaConf.save(compose_job(ROOT / "examples/quickstart", "quickstart", []), saved)
    assert CliRunner().invoke(app, ["doctor", "--quick", "--config", str(saved)]).exit_code == 0


@pytest.mark.parametrize(
    "content", ["", "- a\n", "trainer: [", "actor_rollout_ref: {rollout: {name: '${oc.env:NONE}'}}"]
)
def test_a_file_that_is_no_jobs_config_is_a_fault(monkeypatch, tmp_path, content):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "config.yaml").write_text(content)
    result = CliRunner().invoke(app, ["doctor", "--quick", "--config", str(tmp_path / "config.yaml")])
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1
    assert "1 fault" in result.output


def test_a_damaged_model_is_a_fault(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text("{")
    overrides = [f"{ROLLOUT}.name=rhyme", f"actor_rollout_ref.model.path={tmp_path}"]
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    result = CliRunner().invoke(app, ["doctor", "--quick", *overrides])
    assert isinstance(result.exception, SystemExit) and result.exit_code == 1
    assert "config.json is not JSON" in " ".join(result.output.split())


@pytest.mark.slow
def test_hosts_are_asked_in_a_process_of_their_own(monkeypatch):
    for name, value in CPU.items():
        monkeypatch.setenv(name, value)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    assert "verl's trainer logs rhyme_verl's metrics" in result.output
    assert "vLLM's rejection sampler is exact here" in result.output
