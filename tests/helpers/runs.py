"""Folders like those that runs leave, written with the same code, for the tests of the report."""

import json
import random
import time

from rhyme_verl.telemetry.rollout_stats import RolloutStats
from tests.helpers.traces import write_trajectories

STEPS_PER_EPOCH = 2
LANES = 4


def make_run(folder, seed=0, num_steps=6, num_replicas=2, schedule=True, trace=True):
    """Write a run: metrics.jsonl, stats/replica-*.jsonl and, if wanted, stats/pipe.jsonl and trace/."""
    chance = random.Random(seed)
    folder.mkdir(parents=True)
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, num_steps + 1):
            data = {
                "critic/rewards/mean": 0.3 + 0.1 * step + 0.02 * chance.random(),
                "training/epoch": (step - 1) // STEPS_PER_EPOCH,
                "timing_s/gen": 4.0,
            }
            file.write(json.dumps({"step": step, "data": data}) + "\n")
    for replica in range(num_replicas):
        stats, totals = RolloutStats(str(folder / "stats"), replica), {}
        for step in range(num_steps):
            with stats.running():
                time.sleep(0.001)
                stats.add_tokens(1000)
            drafted, accepted = 200 * (step + 1), 150 * step
            for name, value in (
                ("num_drafts", 50),
                ("num_draft_tokens", drafted),
                ("num_accepted_tokens", accepted),
                ("draft_tokens_from_0", drafted // 2),
                ("accepted_tokens_from_0", accepted // 3),
                ("draft_tokens_from_64", drafted // 2),
                ("accepted_tokens_from_64", accepted // 2),
                ("saved_seconds", 0.5),
            ):
                totals[name] = totals.get(name, 0) + value
            sizes = {"history_store_tokens": 2000 * (step + 1), "history_store_bytes": 9000 * (step + 1)}
            stats.flush(step, totals | sizes)
    if schedule:
        make_schedule(folder / "stats/pipe.jsonl", chance, num_steps, num_replicas)
    if trace:
        rows = []
        for step in range(num_steps):
            for prompt in range(4):
                tokens = [1] * chance.randrange(20, 200)
                one = {"step": step, "epoch": step // STEPS_PER_EPOCH + 1, "prompt_key": prompt, "sample": 0}
                rows.append({**one, "prompt": [1], "tokens": tokens, "reward": 1.0, "validate": False})
        write_trajectories(folder / "trace/part-one-00000.parquet", rows)
    return folder


def make_schedule(path, chance, num_steps, num_replicas):
    """A request a lane and step, that ends somewhere in the step's 10 seconds."""
    with open(path, "w") as file:
        for step in range(num_steps):
            for replica in range(num_replicas):
                for lane in range(LANES):
                    tokens = chance.randrange(100, 1000)
                    start = 1.7e9 + 10 * step
                    line = {
                        "replica": f"replica-{replica}",
                        "uid": f"{step}-{replica}-{lane}",
                        "sample": 0,
                        "step": step,
                        "start": start,
                        "end": start + tokens / 100,
                        "tokens": tokens,
                        "predicted": tokens * chance.uniform(0.7, 1.3),
                        "lanes": LANES,
                    }
                    file.write(json.dumps(line) + "\n")
