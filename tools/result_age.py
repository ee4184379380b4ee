"""Says for each result file how many commits ago it was measured, and how many files that it exercises changed since.

Needs git and the history of the checkout; without them, it says so. The pages therefore do not contain it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = "benchmarks/results"
CORE = ("rhyme_verl/csrc", "rhyme_verl/histospec")
STEP_TIMES = ("rhyme_verl/sim/step_times.py", "rhyme_verl/sim/step_times")
EMULATION = (*STEP_TIMES, "benchmarks/jobs/emulated_clock.py", "benchmarks/jobs/emulated_worker.py")
PACKAGE = ("rhyme_verl", ":!rhyme_verl/commands", ":!rhyme_verl/sim")
JOBS = (*PACKAGE, *EMULATION, "benchmarks/jobs/cases.py", "benchmarks/jobs/end_to_end.py")
EXERCISED: dict[str, tuple[str, ...]] = {  # name of a result file: git's path specifications
    "compat": (*CORE, "rhyme_verl/platforms", "tests/contracts", "tests/compat"),
    "drafter": (*CORE, *STEP_TIMES, "benchmarks/drafting", "benchmarks/traces"),
    "emulated_steps": (*EMULATION, "benchmarks/jobs/emulated_steps.py"),
    "end_to_end": JOBS,
    "end_to_end_256": JOBS,
    "end_to_end_gsm8k_noisy": JOBS,
    "end_to_end_gsm8k_own_speed": JOBS,
    "end_to_end_own_speed": JOBS,
    "end_to_end_separate": JOBS,
    "faults": (*PACKAGE, "tests/jobs"),
    "fuzz": ("rhyme_verl/csrc", "rhyme_verl/history", "rhyme_verl/request_id.py", "tests/fuzz"),
    "host": (*CORE, *STEP_TIMES, "benchmarks/engines/host_time.py", "benchmarks/engines/virtual_time.py"),
    "load": ("rhyme_verl/histopipe", "rhyme_verl/history", "benchmarks/load"),
    "machines": (*PACKAGE, "tests/cluster", "tests/helpers/machines.py"),
    "pipe": (
        "rhyme_verl/histopipe",
        "rhyme_verl/sim",
        "benchmarks/scheduling/bench.py",
        "benchmarks/scheduling/router_speed.py",
        "benchmarks/scheduling/scenarios.py",
    ),
    "pipe_reality": ("rhyme_verl/histopipe", "rhyme_verl/sim", "benchmarks/scheduling/reality.py"),
    "reward_weights": (*CORE, "benchmarks/drafting/reward_weights.py", "benchmarks/drafting/replay.py"),
    "rollout": (*CORE, *STEP_TIMES, "benchmarks/engines/rollout.py", "benchmarks/engines/virtual_time.py"),
    "server_overhead": ("rhyme_verl/integration", "rhyme_verl/history", "benchmarks/jobs/server_overhead.py"),
    "soak": (*PACKAGE, "tests/soak"),
    "soak_stock": ("tests/soak",),
    "step_cost": (*CORE, "benchmarks/engines/step_cost.py"),
    "step_times": (*STEP_TIMES, "benchmarks/jobs/step_times.py"),
    "traces": ("benchmarks/traces", "benchmarks/drafting/trace_facts.py"),
}


def lines() -> Iterator[str]:
    """Yield a line per result file."""
    for name, paths in EXERCISED.items():
        start = json.loads((ROOT / RESULTS / f"{name}.json").read_text(encoding="utf-8"))["commit"]
        num_commits = _git("rev-list", "--count", f"{start}..HEAD")
        if not num_commits:
            yield f"{name}: its commit is not in the history of this checkout"
            continue
        num_changed = len(_git("diff", "--name-only", start, "--", *paths).splitlines())
        yield f"{name}: measured {num_commits} commits ago, {num_changed} exercised files changed since"


def _git(*words: str) -> str:
    """Return what a git command prints; nothing if it fails or git is not installed."""
    try:
        found = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True)
    except FileNotFoundError:
        return ""
    return found.stdout.strip()
