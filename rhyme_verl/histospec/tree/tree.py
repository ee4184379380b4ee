"""A row's draft as a tree: where its tokens stand in the answer, what they attend to, and which of them come true."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROOT = -1  # parent of the tokens that follow the context


@dataclass(frozen=True)
class RowTree:
    """A draft that is verified in the running step.

    The row computes its newest token and then the draft's, in consecutive places of the batch and slots of the cache.

    Attributes:
        start: place of the newest token in the batch.
        computed: tokens of the request before it, whose keys and values are in the cache.
        tokens: of the draft.
        parents: index of the token before each; less than its own, ROOT for the newest token.
    """

    start: int
    computed: int
    tokens: Sequence[int]
    parents: Sequence[int]

    @property
    def branches(self) -> bool:
        """Whether the draft is more than a path."""
        return list(self.parents) != list(range(ROOT, len(self.parents) - 1))

    @property
    def end(self) -> int:
        """One past the draft's last place in the batch."""
        return self.start + 1 + len(self.tokens)

    def positions(self) -> torch.Tensor:
        """Return the position of each draft token in its request, int64 [tokens]: one past that of its parent."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 + (self.computed if parent == ROOT else found[parent]))
        return torch.tensor(found, dtype=torch.int64)

    def ancestors(self) -> torch.Tensor:
        """Return which of the row's tokens each of them follows or is, bool [1 + tokens, 1 + tokens]."""
        size = 1 + len(self.parents)
        mask = torch.eye(size, dtype=torch.bool)
        mask[:, 0] = True
        for i, parent in enumerate(self.parents):
            mask[i + 1] |= mask[parent + 1]
        return mask

    def walk(self, drawn: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the tokens that the request gets, and the indices of the draft's among them.

        Args:
            drawn: the model's token after the newest token and after each of the draft's, int [1 + tokens].
        """
        children = {pair: i for i, pair in enumerate(zip(self.parents, self.tokens, strict=True))}
        answer, accepted, last = [], [], ROOT
        while True:
            answer.append(drawn[last + 1])
            found = children.get((last, answer[-1]))
            if found is None:
                return answer, accepted
            accepted.append(found)
            last = found
