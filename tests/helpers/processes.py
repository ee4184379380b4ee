"""Faults of processes: they are killed, stopped for a while, or find the disk full."""

import resource
from contextlib import contextmanager

import psutil


def find(root, title):
    """Return the descendants of the process `root` (its id) whose command line or title contains `title`."""
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            if any(title in part for part in process.cmdline()):
                found.append(process)
        except psutil.NoSuchProcess:  # it has just ended, or is a zombie
            continue
    return found


@contextmanager
def stopped(*processes):
    """Stop processes as SIGSTOP does, and continue them at the end of the block."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


@contextmanager
def full_disk(pid, num_bytes):
    """Let the files that a process writes grow to `num_bytes` and no further (EFBIG instead of ENOSPC)."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
