"""The description of software and machine that goes into every result file."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("rhyme_verl", "verl", "vllm", "torch", "ray", "transformers", "arctic-inference", "numpy")


def describe() -> dict[str, Any]:
    """Return date, commit, versions, processor, memory and accelerator, as plain values for JSON."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "date": date.today().isoformat(),
        "commit": commit(),
        "python": platform.python_version(),
        "versions": versions,
        "processor": processor(),
        "cpu_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "accelerator": _accelerator(),
    }


def commit() -> str | None:
    """Return the checkout's commit, with `-dirty` after it if files have changed; None outside of git.

    Results do not count: a benchmark may run after another one.
    """
    head = _git("rev-parse", "--short=12", "HEAD")
    changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)benchmarks/results")
    return f"{head}-dirty" if head and changed else head or None


def _git(*arguments: str) -> str:
    found = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True)
    return found.stdout.strip()


def processor() -> str:
    """Return the processor's name, with family and model where Linux tells, as virtual machines hide the generation."""
    if not os.path.exists("/proc/cpuinfo"):
        return platform.processor()
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        parts = (line.partition(":") for line in file.read().partition("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in parts}
    if "model name" not in facts:
        return platform.processor()
    numbers = [f"{name} {facts[key]}" for name, key in (("family", "cpu family"), ("model", "model")) if key in facts]
    return " ".join([facts["model name"], *([f"({', '.join(numbers)})"] if numbers else [])])


def _accelerator() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
