"""Starts a verl job as a child process, writes its output to a file, and ends all of its processes.

A verl job is a tree of processes: driver, Ray daemons, Ray workers, vLLM's engine. `VerlJob` makes this process the
subreaper of the tree, so that it also finds and ends the orphans of a killed driver.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
GRACE_SECONDS = 10.0

CPU_ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",  # verl registers its FSDP engine as cuda; the engine itself asks the platform
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_prestart_worker_first_driver": "0",  # do not start one worker process per logical CPU
    "HF_HUB_OFFLINE": "1",
}


class VerlJob:
    """One run of `python -m verl.trainer.main_ppo`. Use it as a context manager, whose exit ends the whole tree."""

    def __init__(self, arguments: Sequence[str], log_path: Path, environment: Mapping[str, str]) -> None:
        self._command = [sys.executable, "-m", "verl.trainer.main_ppo", *arguments]
        threads = str(psutil.cpu_count(logical=False) or 1)  # for the trainer; the CPU platform gives the engine one
        own = {**CPU_ENVIRONMENT, "RAY_ADDRESS": "local"}  # a Ray of its own, also on a machine where one runs
        self._environment = {"OMP_NUM_THREADS": threads, **os.environ, **own, **environment}
        self.log_path = log_path

    def __enter__(self) -> VerlJob:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._log = open(self.log_path, "wb")
        self._process = subprocess.Popen(
            self._command,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._environment,
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the tree
        )
        return self

    def __exit__(self, *exception: object) -> None:
        try:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGINT)
                self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:  # also after a second Ctrl-C
            leftovers = psutil.Process().children(recursive=True)
            for process in leftovers:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    pass
            psutil.wait_procs(leftovers, timeout=GRACE_SECONDS)
            self._log.close()

    def wait(self) -> int:
        """Wait for the end of the job and return its exit status."""
        return self._process.wait()

    def poll(self) -> int | None:
        """Return the exit status, or None while the job runs."""
        return self._process.poll()

    def log_tail(self, num_lines: int = 30) -> str:
        """Return the last lines of the job's output, for error messages."""
        return "\n".join(self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-num_lines:])
