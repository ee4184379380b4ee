"""A replica's counters in the process of its HTTP server, so that vLLM's `/metrics` shows them beside its own.

verl switches vLLM's own metrics off unless `rollout.disable_log_stats=false`; these are there either way. They change
with every weight update.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

COUNTERS = {
    "tokens": "Tokens generated.",
    "answers": "Requests answered.",
    "busy_seconds": "Seconds with at least one request running.",
    "num_drafts": "Drafts verified.",
    "num_draft_tokens": "Draft tokens verified.",
    "num_accepted_tokens": "Draft tokens accepted.",
}
GAUGES = {
    "saved_seconds": "Seconds that drafting is estimated to have saved in the latest step.",
    "history_tokens": "Tokens of history in this replica's engine.",
    "history_bytes": "Bytes of history in this replica's engine.",
    "history_store_tokens": "Tokens of history in the job's store.",
    "history_store_bytes": "Bytes of history in the job's store.",
}


class ReplicaMetrics:
    """The metrics `rhyme_...{replica="0"}`. Make one in a process: names are registered once."""

    def __init__(self, replica: int) -> None:
        label = str(replica)
        self._counters = {
            name: Counter(f"rhyme_{name.removeprefix('num_')}", text, ["replica"]).labels(label)
            for name, text in COUNTERS.items()
        }
        self._gauges = {name: Gauge(f"rhyme_{name}", text, ["replica"]).labels(label) for name, text in GAUGES.items()}

    def add(self, counts: Mapping[str, float]) -> None:
        """Take what the replica did since the last call (`stats.RolloutStats.flush`)."""
        for name, counter in self._counters.items():
            counter.inc(max(counts.get(name, 0), 0))  # an engine that was started anew counts from 0
        for name, gauge in self._gauges.items():
            if name in counts:
                gauge.set(counts[name])
