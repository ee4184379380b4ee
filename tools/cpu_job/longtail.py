"""Trains the long-tail policy: the quickstart policy learns problems whose answers' p99 is ten times their median.

Its answer lengths vary as in real jobs, but it is small enough for two cores. `python -m tools.cpu_job.longtail` takes
about 15 minutes.
"""

from tools.cpu_job.policy import REPOSITORY, Hyperparameters, run
from tools.cpu_job.problems import LONGTAIL

SHIPPED_POLICY = REPOSITORY / "examples/longtail/policy"
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
