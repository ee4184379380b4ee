"""Lengths of simulated answers are as predictable as those of a recorded run."""

from pathlib import Path

import numpy as np
import pytest

from rhyme_verl.histopipe.lengths import LengthPredictor
from rhyme_verl.sim.workload import LogNormal, from_distribution
from rhyme_verl.telemetry.trace import read_trace

TRACE = Path(__file__).parents[2] / "benchmarks/traces/quickstart.parquet"
CAP = 400  # tokens at which the recorded answers were cut off
EPOCHS, PROMPTS, SAMPLES = 6, 64, 8


def recorded():
    """The training answers of the trace, by epoch: prompt keys, lengths [prompts, samples] and steps of the prompts."""
    table = read_trace(TRACE)
    train = ~table.column("validate").to_numpy(zero_copy_only=False)
    names = ("epoch", "step", "prompt_key", "sample", "length")
    epoch, step, key, sample, length = (table.column(name).to_numpy()[train] for name in names)
    order = np.lexsort((sample, key, epoch))
    by_epoch = (EPOCHS, PROMPTS, SAMPLES)
    return np.unique(key), length[order].reshape(by_epoch).astype(np.int64), step[order].reshape(by_epoch)[:, :, 0]


def rank_correlation(keys, lengths, steps):
    """The mean rank correlation of lengths with the predictions from earlier steps, from the second epoch on."""
    predictor = LengthPredictor()
    by_epoch = [[] for _ in lengths]
    for step in np.unique(steps).tolist():
        for epoch in range(EPOCHS):
            prompts = np.flatnonzero(steps[epoch] == step)
            if len(prompts):
                found = lengths[epoch, prompts].ravel()
                by_epoch[epoch].append(predictor.observe(keys[prompts].repeat(SAMPLES), found, found >= CAP, step))
    return np.mean([np.mean(one) for one in by_epoch[1:]])


def spread(lengths):
    """Spread of log lengths within a group and of the change of a prompt's mean, as shares of the whole spread."""
    logs = np.log(lengths[1:])  # without the first epoch, in which a policy changes most
    total = np.mean(np.var(logs.reshape(len(logs), -1), axis=1))
    within = np.mean(np.var(logs, axis=2, ddof=1))
    changes = np.diff(logs.mean(axis=2), axis=0)
    between = np.mean(np.var(changes, axis=1)) - 2.0 * within / SAMPLES
    return {"within_group": np.sqrt(within / total), "epoch_noise": np.sqrt(max(0.0, between) / total)}


def test_lengths_are_predicted_in_the_workload_as_well_as_on_the_trace():
    keys, lengths, steps = recorded()
    drawn = from_distribution(LogNormal(p99_over_median=5.0, **spread(lengths)), steps=4, groups=64, samples=16)
    assert drawn.rank_correlation == pytest.approx(rank_correlation(keys, lengths, steps), abs=0.015)
