"""CPU seconds and py-spy profiles of child processes, grouped by role, and their cleanup.

A role is the purpose of a process (`server`, `worker`). The caller assigns roles to process ids.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from examples.quickstart.job import GRACE_SECONDS, PR_SET_CHILD_SUBREAPER

OTHERS = "others"
PY_SPY = Path(sys.executable).with_name("py-spy")  # exists once py-spy is installed in this environment
SAMPLES_PER_SECOND = 100
TOP_FUNCTIONS = 15
# Files whose functions only start or await others, so that the time below them means nothing.
LAUNCHERS = ("<", "asyncio/", "concurrent/", "multiprocessing/", "ray/", "threading.py", "typer/", "uvloop/")

Roles = Mapping[str, Sequence[int]]  # process ids by role


def cpu_seconds() -> dict[int, float]:
    """Return the CPU seconds used so far by this process and all its descendants, by process id."""
    used = {}
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            used[process.pid] = times.user + times.system
    return used


def by_role(before: Mapping[int, float], after: Mapping[int, float], roles: Roles) -> dict[str, float]:
    """Return the CPU seconds between two measurements by role; processes without a role count as OTHERS."""
    used = {pid: seconds - before.get(pid, 0.0) for pid, seconds in after.items()}
    shares = {role: sum(used.pop(pid, 0.0) for pid in pids) for role, pids in roles.items()}
    return {**shares, OTHERS: sum(used.values())}


async def profile(roles: Roles, seconds: int, keep_busy: Callable[[], Awaitable[Any]]) -> dict[str, Any]:
    """Profile the last process of each role with py-spy while calling `keep_busy` in a loop.

    The processes are not paused. An event loop's native code and its waiting appear as `Thread.run`.

    Returns:
        The result of `aggregate` by role.
    """
    with tempfile.TemporaryDirectory() as folder:
        paths = {role: Path(folder) / role for role, pids in roles.items() if pids}
        arguments = ("--nonblocking", "--format=raw", f"--rate={SAMPLES_PER_SECOND}", f"--duration={seconds}")
        watchers = [
            subprocess.Popen(
                [PY_SPY, "record", *arguments, f"--pid={roles[role][-1]}", f"--output={path}"],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for role, path in paths.items()
        ]
        while any(watcher.poll() is None for watcher in watchers):
            await keep_busy()
        stacks = {role: path.read_text(encoding="utf-8") for role, path in paths.items() if path.exists()}
    return {role: aggregate(raw, seconds * SAMPLES_PER_SECOND) for role, raw in stacks.items()}


def aggregate(raw: str, num_samples: int) -> dict[str, Any]:
    """Sum up py-spy's stacks (`outer (file:line);inner (file:line) count`) by function.

    Returns:
        `busy_threads`, the mean number of busy threads, and the functions with the largest shares of their time: `self`
        (in the function itself) and `inclusive` (with what it calls; without LAUNCHERS).
    """
    own: Counter[str] = Counter()
    inclusive: Counter[str] = Counter()
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        functions = [_without_line_number(frame) for frame in stack.split(";")]
        own[functions[-1]] += int(count)
        inclusive.update(dict.fromkeys(filter(_does_something, functions), int(count)))
    total = own.total()
    return {
        "busy_threads": round(total / num_samples, 3),
        "self": {name: round(count / total, 4) for name, count in own.most_common(TOP_FUNCTIONS)},
        "inclusive": {name: round(count / total, 4) for name, count in inclusive.most_common(TOP_FUNCTIONS)},
    }


def _without_line_number(frame: str) -> str:
    function, colon, line = frame.rpartition(":")
    return f"{function})" if colon and line.rstrip(")").isdigit() else frame


def _does_something(function: str) -> bool:
    return not function.rpartition("(")[2].startswith(LAUNCHERS)


@contextmanager
def no_process_left() -> Iterator[None]:
    """Kill all processes that were started inside, orphans included, also after an error."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        while leftovers := psutil.Process().children(recursive=True):
            for process in leftovers:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(leftovers, timeout=GRACE_SECONDS)
