"""Chooses the shape of units: candidates are simulated with the job's own lengths and step cost, in another process."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from rhyme_verl.histopipe.scheduler import Scheduler
from rhyme_verl.histopipe.units import UnitShape, default_shape

MAX_SECONDS = 10.0
ALIKE = 0.02  # a difference in speed that younger answers are worth
MIN_GROUPS = 32  # with known lengths, without which nothing is simulated


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What the simulation expects of a shape.

    Attributes:
        steps_per_hour: without the trainer's time.
        mean_age, max_age: weight updates between an answer's first token and its training.
        mixed: share of answers that more than one policy version generates.
    """

    shape: UnitShape
    steps_per_hour: float
    mean_age: float
    max_age: int
    mixed: float


@dataclass(frozen=True)
class Choice:
    """The best of the candidates, and what the default would do."""

    best: Expected
    default: Expected

    @property
    def shape(self) -> UnitShape:
        return self.best.shape

    def __str__(self) -> str:
        one = self.best
        return (
            f"units of {one.shape.batches} batches, {one.shape.carried} groups carried over: {one.steps_per_hour:.1f} "
            f"rollouts per hour expected ({self.default.steps_per_hour:.1f} with {self.default.shape.batches} and "
            f"{self.default.shape.carried}), age {one.mean_age:.2f} on average and at most {one.max_age}, "
            f"{one.mixed:.1%} of answers of mixed versions"
        )


def candidates(max_age: int, batch_size: int, warmup_batches: float) -> list[UnitShape]:
    """Return the shapes that respect the age limit and that the trainer submits enough groups for."""
    shapes = [default_shape(max_age, batch_size)]
    for carried in (batch_size // 8, batch_size // 4, batch_size // 2, (3 * batch_size) // 4):
        shapes += [UnitShape(max_age, carried), UnitShape(max_age - 1, carried)]
    shapes.append(UnitShape(max_age + 1, 0))
    return [
        one
        for one in dict.fromkeys(shapes)
        if one.batches >= 1 and one.batches - 1 + one.carried / batch_size <= warmup_batches + 1e-9
    ]


async def choose_shape(scheduler: Scheduler, warmup_batches: float, samples: int) -> Choice | None:
    """Simulate the candidates (at most about ten seconds) and return the best; None if too little is known."""
    job = scheduler.job
    if len(scheduler.recent) < MIN_GROUPS:
        return None
    shapes = candidates(job.max_age, job.batch_size, warmup_batches)
    base, slope = scheduler.cost.base_and_slope()
    request = {
        "shapes": [asdict(shape) for shape in shapes],
        "groups": list(scheduler.recent),
        "replicas": len(scheduler.lanes.replicas),
        "max_running": scheduler.lanes.max_running,
        "batch_size": job.batch_size,
        "samples": samples,
        "max_age": job.max_age,
        "warmup_batches": warmup_batches,
        "base_seconds": base,
        "sequence_seconds": slope,
        "max_seconds": MAX_SECONDS,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rhyme_verl.sim.choose",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, errors = await asyncio.wait_for(process.communicate(json.dumps(request).encode()), 6 * MAX_SECONDS)
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        raise RuntimeError(errors.decode(errors="replace").strip().rpartition("\n")[2])
    found = [_expected(one) for one in json.loads(out)]
    fastest = max(one.steps_per_hour for one in found)
    alike = [one for one in found if one.steps_per_hour >= (1.0 - ALIKE) * fastest]
    return Choice(min(alike, key=lambda one: one.mean_age), found[0])


def _expected(line: dict[str, Any]) -> Expected:
    return Expected(**{**line, "shape": UnitShape(**line["shape"])})
