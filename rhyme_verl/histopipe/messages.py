"""All messages between the router, the agent-loop workers, the agent-loop manager and verl's table of groups.

Workers report in batches (`HistoPipeRouter.report`) and listen for `News`; the manager submits groups. No call is made
per answer: the news of a lane names the replica, so a worker can send requests there directly. Frequent messages are
named tuples, which are unpickled faster than data classes.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from rhyme_verl.request_id import AnswerId


class Group(NamedTuple):
    """A prompt and the number of answers to generate."""

    uid: str  # verl's id of this rollout of the prompt
    prompt: int  # uint64 that identifies the prompt across epochs
    samples: int
    step: int  # training step in which the trainer submitted it


class Follows(NamedTuple):
    """A worker has received these groups; from now on it gets their news."""

    uids: list[str]


class Begun(NamedTuple):
    """The first answer of a group begins."""

    uid: str


class Started(NamedTuple):
    """A request of an answer is being sent to the replica of its lane."""

    answer: AnswerId


class Stopped(NamedTuple):
    """A request of an answer has ended: a turn is complete, or the request was aborted."""

    answer: AnswerId


class Finished(NamedTuple):
    """An answer is complete or has failed; its lane is free."""

    answer: AnswerId
    tokens: int | None  # number of generated tokens; None if the answer failed
    truncated: bool = False  # cut off at the length limit
    prompt_tokens: int = 0
    tool_tokens: int = 0  # number of tokens in its context that are neither prompt nor generated
    versions: tuple[int, int] | None = None  # first and last policy version that generated the answer, if known


class GroupEnded(NamedTuple):
    """All answers of a group have ended; the worker waits for `News.published` before it reports the group to verl."""

    uid: str
    failed: bool


Report = Follows | Begun | Started | Stopped | Finished | GroupEnded
# Answer, replica: it runs there from now on; None: its next request waits for another lane.
LaneNews = tuple[AnswerId, str | None]


@dataclass(slots=True)
class News:
    """What a worker has not received yet."""

    number: int = 0  # counts a worker's news, so that news that the network has lost is sent again
    lanes: list[LaneNews] = field(default_factory=list)  # in order
    published: list[str] = field(default_factory=list)  # uids of groups that the trainer may see
    handles: dict[str, Any] = field(default_factory=dict)  # of replicas that the worker does not know yet, by name


class Outbox(Protocol):
    """Receives the scheduler's decisions."""

    def grant(self, answer: AnswerId, replica: str) -> None:
        """Run the answer on this replica from now on."""

    def park(self, answer: AnswerId) -> None:
        """Hold the answer's next request back until another `grant`."""

    def publish(self, uid: str) -> None:
        """Let the trainer see the group."""


class GroupTable(Protocol):
    """The part of verl's table of groups that the router uses."""

    def available(self, published: Set[str]) -> set[str]:
        """Return the uids of training groups that the trainer has not taken: the finished ones in the table, and those
        of `published` that have not failed.
        """

    def mark_failed(self, uids: Sequence[str]) -> None:
        """Mark groups that will never finish as failed, for the trainer."""
