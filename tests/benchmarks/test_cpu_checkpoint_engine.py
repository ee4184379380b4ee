"""The checkpoint engine of jobs without a GPU: two trainer ranks and two rollout workers, a thread each, over gloo."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from benchmarks.jobs.cpu_checkpoint_engine import CpuCheckpointEngine

BUCKET_BYTES = 1024
NUM_TRAINERS, NUM_ROLLOUTS = 2, 2


def make_weights(version: int) -> dict[str, torch.Tensor]:
    """Tensors of odd sizes and dtypes: some share a bucket, one fills several."""
    generator = torch.Generator().manual_seed(version)

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    return {
        "embedding": uniform(30, 37),
        "norm": uniform(3).to(torch.bfloat16),
        "scale": uniform(1).squeeze(0),
        "head": uniform(7, 5).to(torch.float16),
        "exactly_one_bucket": uniform(BUCKET_BYTES // 4),
        "last": uniform(2, 2),
    }


def send(engine: CpuCheckpointEngine, version: int) -> int:
    """Send the weights of a version; returns how many tensors this trainer rank took part in gathering."""
    num_gathered = 0

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_gathered
        for weight in make_weights(version).items():
            num_gathered += 1
            yield weight

    asyncio.run(engine.send_weights(gather()))
    return num_gathered


def receive(engine: CpuCheckpointEngine) -> dict[str, torch.Tensor]:
    async def collect() -> dict[str, torch.Tensor]:
        return {name: weight.clone() async for name, weight in engine.receive_weights()}

    return asyncio.run(collect())


def test_every_rollout_worker_gets_the_trainers_weights_at_every_update() -> None:
    trainers = [CpuCheckpointEngine(bucket_size=BUCKET_BYTES, is_master=rank == 0) for rank in range(NUM_TRAINERS)]
    rollouts = [CpuCheckpointEngine(bucket_size=BUCKET_BYTES) for _ in range(NUM_ROLLOUTS)]
    engines = trainers + rollouts
    with ThreadPoolExecutor(len(engines)) as pool:
        for version in (1, 2):
            metadata = [engine.prepare() for engine in engines]
            columns = CpuCheckpointEngine.build_topology(NUM_TRAINERS, NUM_ROLLOUTS, metadata)
            rows = [dict(zip(part, row, strict=True)) for part in columns for row in zip(*part.values(), strict=True)]
            list(pool.map(lambda engine, row: engine.init_process_group(**row), engines, rows))
            received = [pool.submit(receive, engine) for engine in rollouts]
            num_gathered = list(pool.map(send, trainers, [version] * NUM_TRAINERS))

            expected = make_weights(version)
            assert num_gathered == [len(expected)] * NUM_TRAINERS  # gathering shards needs all of the trainer's ranks
            for future in received:
                weights = future.result(timeout=30)
                assert list(weights) == list(expected)
                for name, weight in weights.items():
                    assert weight.dtype == expected[name].dtype and torch.equal(weight, expected[name]), name
            for engine in engines:
                engine.finalize()


def test_verl_finds_the_engine_by_its_backend() -> None:
    assert CheckpointEngineRegistry.get("cpu") is CpuCheckpointEngine
