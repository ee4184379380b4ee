"""Which running sequences to move: answers that outlive their prediction, from where many run to where few do.

A sequence among many gets its tokens slowly, which is what the planner wants for short ones; one that turns out long
is resumed on a replica with few, where its prefix is recomputed. Pure functions; source: RhymeRL, arXiv 2508.18588.
"""

from __future__ import annotations

from rhyme_verl.histopipe.step_cost import StepCost

EXPECTED_REST = 0.25  # tokens still to come by tokens there are, of a sequence longer than its predicted span


def seconds_saved(
    tokens: float, running_here: int, running_there: int, cost: StepCost, recompute_seconds_per_token: float
) -> float:
    """Return how much sooner a sequence that has outlived its prediction is expected to end if it is moved.

    Args:
        tokens: what it has generated.
        running_here: sequences on its replica, itself included.
        running_there: sequences on the other one, itself not included.
        cost: seconds of a step.
        recompute_seconds_per_token: of its prefix.
    """
    most = cost.max_running
    faster = cost.seconds[min(running_here, most)] - cost.seconds[min(running_there + 1, most)]
    return float(EXPECTED_REST * tokens * faster - tokens * recompute_seconds_per_token)
