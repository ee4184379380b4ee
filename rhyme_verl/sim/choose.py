"""Simulates shapes of units for a running job: `python -m rhyme_verl.sim.choose` reads a request and writes outcomes.

Groups are drawn with replacement from the job's latest ones (predicted and true lengths). The cluster is scaled down to
at most eight replicas. `rhyme_verl.histopipe.choice` starts this module.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

from rhyme_verl.histopipe.replica_cost import ReplicaCost
from rhyme_verl.histopipe.units import UnitShape
from rhyme_verl.sim.cluster import Fleet
from rhyme_verl.sim.experiment import Case, Scenario, play
from rhyme_verl.sim.workload import Workload

MAX_REPLICAS = 8
MIN_STEPS, MIN_UNITS = 18, 6  # minimum length of a simulation; its first third is excluded from the results
MAX_ANSWERS = 1500  # answers per step; larger steps are scaled down to keep the simulation fast


def choose(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the outcomes of as many shapes as time permits, at least that of the first."""
    began = time.monotonic()
    scale = max(request["replicas"] / MAX_REPLICAS, request["batch_size"] * request["samples"] / MAX_ANSWERS, 1.0)
    batch_size = max(4, round(request["batch_size"] / scale))
    scale = request["batch_size"] / batch_size
    replicas = max(1, round(request["replicas"] / scale))
    lanes = max(1, round(request["max_running"] * request["replicas"] / scale / replicas))
    cost = ReplicaCost.affine(
        request["base_seconds"], request["sequence_seconds"] * request["max_running"] / lanes, lanes
    )
    fleet = Fleet(speeds=np.ones(replicas), max_running=lanes, cost=cost)
    steps = max(MIN_STEPS, MIN_UNITS * max(shape["batches"] for shape in request["shapes"]))
    scenario = Scenario(workload=_workload(request, steps, batch_size), fleet=fleet, steps=steps)
    outcomes = []
    for wanted in request["shapes"]:
        shape = UnitShape(wanted["batches"], round(wanted["carried"] / scale))
        warmup = max(1, int(request["warmup_batches"]))
        case = Case(
            mode="colocate_async", system="histopipe", max_age=request["max_age"], shape=shape, warmup_batches=warmup
        )
        outcome, _ = play(scenario, case)
        outcomes.append(
            {
                "shape": wanted,
                "steps_per_hour": outcome.steps_per_hour,
                "mean_age": outcome.age_mean,
                "max_age": outcome.age_max,
                "mixed": outcome.mixed,
            }
        )
        if time.monotonic() - began > request["max_seconds"] * len(outcomes) / (len(outcomes) + 1):
            break
    return outcomes


def _workload(request: dict[str, Any], steps: int, batch_size: int) -> Workload:
    rng = np.random.default_rng(0)
    samples = request["samples"]
    predicted, lengths = [], []
    for index in rng.integers(0, len(request["groups"]), steps * batch_size).tolist():
        mean, answers = request["groups"][index]
        predicted.append(mean)
        lengths.append(rng.choice(answers, samples))
    shape = (steps, batch_size)
    mean = np.array(predicted).reshape(shape)
    return Workload(
        lengths=np.array(lengths, dtype=np.int64).reshape(*shape, samples),
        mean=mean, max_tokens=float(np.max(lengths)),
        rank_correlation=float("nan"), rank_churn=float("nan"),
    )  # fmt: skip


if __name__ == "__main__":
    os.nice(10)
    json.dump(choose(json.load(sys.stdin)), sys.stdout)
