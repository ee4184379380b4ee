"""Trains the long-tail policy: the quickstart policy learns problems whose answers' p99 is ten times their median.

What a scheduler and a drafter have to cope with in real jobs, small enough for two cores. Takes about 15 minutes:
`python -m examples.longtail.policy`.
"""

from pathlib import Path

from examples.quickstart.policy import Hyperparameters, run
from examples.quickstart.problems import LONGTAIL

SHIPPED_POLICY = Path(__file__).parent / "policy"
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
