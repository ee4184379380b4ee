"""Extensions of verl's rollout client: requests carry their answer's identity, and go to the replica of its lane.

verl's own request ids do not contain the uid of the group, and verl asks its load balancer for a replica per request.
"""

from __future__ import annotations

import copy
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from verl.utils.tokenizer import normalize_token_ids

from rhyme_verl.histopipe.worker_lanes import GrantedLane, WorkerLanes
from rhyme_verl.request_id import AnswerId, RequestTag, tag_of


@dataclass(slots=True)
class RunningAnswer:
    """The answer that the current asyncio task generates.

    Attributes:
        prompt: token ids of the answer's first prompt; None before its first request.
    """

    answer: AnswerId
    prompt: list[int] | None = None

    def known_tokens(self, prompt_ids: list[int]) -> int:
        """Return the length of the first prompt; 0 if a request's prompt does not begin with it.

        An agent loop may rewrite its context; the history does not remember such requests.
        """
        if self.prompt is None:
            self.prompt = list(prompt_ids)
        length = len(self.prompt)
        return length if list(prompt_ids[:length]) == self.prompt else 0


running_answer: ContextVar[RunningAnswer] = ContextVar("running_answer")


class _RoutedClient:
    """Mixin for verl's client: every request id tells the server which answer the request continues.

    With lanes, requests wait for the lane of their answer, and go to the replica of that lane.
    """

    lanes: WorkerLanes | None

    async def generate(self, request_id: Any, *, prompt_ids: list[int], **kwargs: Any) -> Any:
        prompt_ids = normalize_token_ids(prompt_ids)
        running = running_answer.get(None)
        if running is None:
            return await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)  # type: ignore[misc]
        tag = RequestTag(running.answer, running.known_tokens(prompt_ids))
        return await super().generate(tag.append_to(request_id), prompt_ids=prompt_ids, **kwargs)  # type: ignore[misc]

    def _vllm_request_id(self, request_id: str, **named: Any) -> str:
        tag, plain = tag_of(request_id), super()._vllm_request_id(request_id, **named)  # type: ignore[misc]
        return plain if tag is None or tag_of(plain) is not None else tag.append_to(plain)

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[Any, Any]:
        tag = tag_of(request_id)
        if tag is not None and self.lanes is not None:
            lane = await self.lanes.lane(tag.answer)
            if lane is not None:
                self.lanes.start(lane.answer)
                return lane, lane.handle  # verl's client only passes the lane on to `_release_server`
        return await super()._acquire_server(request_id, **extra)  # type: ignore[misc, no-any-return]

    def _release_server(self, server_id: Any, *args: Any, **named: Any) -> None:
        if self.lanes is not None and isinstance(server_id, GrantedLane):
            self.lanes.stop(server_id.answer)
        else:
            super()._release_server(server_id, *args, **named)  # type: ignore[misc]


def routed(client: Any, lanes: WorkerLanes | None = None) -> Any:
    """Return a copy of the client, of any class, whose requests carry their answer's identity and follow `lanes`."""
    extended = copy.copy(client)
    if not isinstance(client, _RoutedClient):
        extended.__class__ = type("RoutedClient", (_RoutedClient, type(client)), {})
    extended.lanes = lanes
    return extended
