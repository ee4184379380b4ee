"""What `import verl` alone brings, in fresh processes."""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from omegaconf import OmegaConf

import rhyme_verl
from rhyme_verl.integration import plugin
from rhyme_verl.integration.preflight import MANAGER, MANAGER_KEY, ROUTER_KEY, prepare_job


def run(code, cwd=None, **environment):
    variables = {**os.environ, **environment}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=variables, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.split()


def test_import_verl_registers_the_rollout_without_importing_an_engine():
    out = run(
        "import sys, verl\n"
        "modules = ('rhyme_verl.integration.plugin', 'vllm', 'verl.workers.rollout.base')\n"
        "print(*(module in sys.modules for module in modules))\n"
        "from verl.workers.rollout.base import get_rollout_class\n"
        "from verl.workers.rollout.replica import get_rollout_replica_class\n"
        "print(get_rollout_class('rhyme', 'async').__name__, get_rollout_replica_class('rhyme').__name__)\n"
        "from verl.plugin.platform.platform_manager import PlatformRegistry\n"
        "print('cpu' in PlatformRegistry.registered_names())",
        VERL_PLATFORM="",
    )
    assert out == ["True", "False", "False", "RhymeServerAdapter", "RhymeReplica", "False"]


@pytest.mark.slow
def test_the_cpu_platform_is_there_when_asked_for():
    code = (
        "import verl\n"
        "from verl.plugin.platform.platform_manager import PlatformRegistry\n"
        "from verl.plugin.platform import get_platform\n"
        "print('cpu' in PlatformRegistry.registered_names(), get_platform().device_name)"
    )
    assert run(code, VERL_PLATFORM="cpu") == ["True", "cpu"]


@pytest.mark.slow
def test_ray_workers_know_the_rollout_too():
    out = run(
        "import ray\n"
        "from tests.helpers.ray_node import start_ray\n"
        "start_ray(num_cpus=1)\n"
        "@ray.remote\n"
        "def name():\n"
        "    from verl.workers.rollout.base import get_rollout_class\n"
        "    return get_rollout_class('rhyme', 'async').__name__\n"
        "print(ray.get(name.remote()))"
    )
    assert out == ["RhymeServerAdapter"]


@pytest.mark.slow
def test_a_node_with_another_installation_loads_its_own_router(tmp_path):
    """The driver's config goes to another node, in which verl resolves it and looks for the router's file."""
    (tmp_path / "rhyme_verl").symlink_to(Path(rhyme_verl.__file__).parent)
    config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "rhyme", "custom": {}}}})
    prepare_job(config)
    (tmp_path / "config").write_bytes(pickle.dumps(config))
    out = run(
        "import pickle, verl\n"
        "from pathlib import Path\n"
        "from omegaconf import OmegaConf\n"
        f"config = pickle.loads(Path('{tmp_path}/config').read_bytes())\n"
        "OmegaConf.resolve(config)\n"
        "from verl.workers.rollout.router import _load_router_yaml\n"
        f"path = OmegaConf.select(config, '{ROUTER_KEY}')\n"
        "print(path, _load_router_yaml(path)['router_class'])",
        cwd=tmp_path,
        PYTHONPATH=str(tmp_path),
    )
    assert out == [f"{tmp_path}/rhyme_verl/histopipe/router.yaml", "rhyme_verl.histopipe.router.HistoPipeRouter"]


class Runner:
    pass


def test_a_program_that_calls_nothing_but_run_ppo_gets_a_whole_job():
    started = []
    module = SimpleNamespace(
        TaskRunnerV1=ray.remote(Runner), run_ppo=lambda config, task_runner_class: started.append(config.copy())
    )
    plugin._check_runner(module)
    module.run_ppo(
        OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": "rhyme", "custom": {}}}}), module.TaskRunnerV1
    )
    (config,) = started
    assert OmegaConf.select(config, MANAGER_KEY) == MANAGER and OmegaConf.select(config, ROUTER_KEY)


def refusal(folder, module, *overrides):
    """The only line that a job with rhyme prints about rhyme_verl; it ends before Ray starts."""
    result = subprocess.run(
        [sys.executable, "-m", module, "actor_rollout_ref.rollout.name=rhyme", *overrides],
        cwd=folder,
        env={**os.environ, "VERL_PLATFORM": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    assert "ray init" not in result.stdout
    (line,) = [line for line in result.stderr.splitlines() if "rhyme_verl:" in line]
    return line


@pytest.mark.slow
def test_a_bad_job_stops_before_ray_starts_with_one_line(tmp_path):
    override = "+actor_rollout_ref.rollout.custom.rhyme.spec.max_draft=4"
    assert "custom.rhyme.spec.max_draft:" in refusal(tmp_path, "verl.trainer.main_ppo", override)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "runner"),
    [
        ("verl.experimental.one_step_off_policy.main_ppo", "__main__.OneStepTaskRunner"),
        ("verl.experimental.fully_async_policy.fully_async_main", "FullyAsyncTaskRunner"),
    ],
)
def test_verls_trainers_other_than_v1_are_refused_before_ray_starts(tmp_path, module, runner):
    line = refusal(tmp_path, module, "hydra.searchpath=[pkg://verl.trainer.config]")
    assert f"{runner} does not run verl's V1 trainer" in line
    assert "actor_rollout_ref.rollout.name=vllm" in line and "verl.trainer.main_ppo" in line
