"""Trains the long-tail policy: the quickstart policy learns problems whose answers' p99 is ten times their median.

Its answer lengths vary as in real jobs, but it is small enough for two cores. `python -m
benchmarks.jobs.longtail_policy` takes about 15 minutes.
"""

from examples.quickstart.policy import REPOSITORY, Hyperparameters, run
from examples.quickstart.problems import LONGTAIL

SHIPPED_POLICY = REPOSITORY / "benchmarks/policies/longtail"
MAX_ANSWER_TOKENS = 1024
HYPERPARAMETERS = Hyperparameters(
    task=LONGTAIL,
    num_steps=2_000,
    num_problems=32_000,
    max_learning_rate=1e-3,
    bf16=True,
    starts_from_quickstart=True,
)

if __name__ == "__main__":
    run(SHIPPED_POLICY, HYPERPARAMETERS, MAX_ANSWER_TOKENS)
