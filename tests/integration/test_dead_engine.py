"""No process of an engine outlives it; verl's server ends them."""

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow]

DYING_SERVER = """
import asyncio, os
from rhyme_verl.integration.engine_client import engine_processes
from rhyme_verl.integration.rollout import RhymeHttpServer
from tests.helpers.async_engine import async_engine
from tests.helpers.processes import find

async def scenario():
    server = object.__new__(RhymeHttpServer)
    server.replica_rank, server._history = 0, None
    async with async_engine(tensor_parallel_size=2) as server.engine:
        processes = engine_processes()
        workers = find(os.getpid(), "VLLM::Worker")
        assert len(workers) == 2 and set(workers) < set(processes)
        print("processes", *(process.pid for process in processes), flush=True)
        workers[1].suspend()  # as in a collective operation whose other ranks are gone
        find(os.getpid(), "VLLM::EngineCore")[0].kill()
        await server._end_with_engine(processes)

if __name__ == "__main__":
    asyncio.run(scenario())
"""


def test_no_process_of_a_dead_engine_outlives_its_server(tmp_path):
    script = tmp_path / "server.py"
    script.write_text(DYING_SERVER)
    folder = Path(__file__).parents[2]
    environment = os.environ | {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "PYTHONPATH": str(folder)}
    log = tmp_path / "log"
    with log.open("w") as output:
        server = subprocess.run([sys.executable, script], cwd=folder, env=environment, stdout=output, stderr=output)
    (line,) = [line for line in log.read_text().splitlines() if line.startswith("processes ")]
    left = [process for process in psutil.process_iter() if str(process.pid) in line.split()]
    left = [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    for process in left:
        process.kill()
    assert (server.returncode, left) == (1, []), log.read_text()[-3000:]
