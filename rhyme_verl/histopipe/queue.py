"""Late binding without a plan: the oldest step first, within it the longest prediction first, into any free lane.

For work that flows on and on (nothing ends in a barrier), and for what comes in between. A pure object.
"""

from __future__ import annotations

import heapq

import numpy as np


class LongestFirst:
    """Waiting sequences, dealt out evenly as replicas get room.

    Attributes:
        max_running: sequences that run at once on a replica.
    """

    def __init__(self, max_running: int) -> None:
        self.max_running = max_running
        self._waiting: list[tuple[int, float, int]] = []  # step, predicted tokens below 0, sequence

    def __len__(self) -> int:
        """Return the number of sequences that wait."""
        return len(self._waiting)

    def open(self, sequences: np.ndarray, tokens: np.ndarray, step: int) -> None:
        """Let sequences (int64 [sequences]) of these predicted tokens [sequences] be handed out."""
        for sequence, length in zip(sequences.tolist(), tokens.tolist(), strict=True):
            heapq.heappush(self._waiting, (step, -length, sequence))

    def take(self, running: int, running_in_all: int, replicas: int) -> list[int]:
        """Return what a replica with `running` sequences starts, where all `replicas` run so many in all."""
        share = -(-(running_in_all + len(self._waiting)) // replicas)
        room = min(self.max_running, share) - running
        return [heapq.heappop(self._waiting)[2] for _ in range(min(room, len(self._waiting)))]
