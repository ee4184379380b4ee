"""The client's requests: which answer they continue, which replica they go to; verl's own client is the base."""

import asyncio
from types import SimpleNamespace

import pytest
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from rhyme_verl.histopipe.worker_lanes import GrantedLane
from rhyme_verl.integration.routed_client import RunningAnswer, routed, running_answer
from rhyme_verl.request_id import RequestTag, tag_of

pytestmark = pytest.mark.engine

CONFIG = SimpleNamespace(
    actor_rollout_ref=SimpleNamespace(rollout=SimpleNamespace(name="rhyme", full_determinism=False, response_length=8))
)


class Remote:
    """A method of a Ray actor's handle."""

    def __init__(self, function):
        self._function = function

    async def remote(self, *args, **kwargs):
        return self._function(*args, **kwargs)


class Server:
    """Generates one token per request; the first request is aborted after it."""

    def __init__(self):
        self.requests = []
        self.generate = Remote(self._generate)

    def _generate(self, request_id, prompt_ids, **_):
        self.requests.append((request_id, list(prompt_ids)))
        reason = "aborted" if len(self.requests) == 1 else "completed"
        return TokenOutput(token_ids=[100 + len(self.requests)], log_probs=[0.0], stop_reason=reason)


class Balancer:
    def __init__(self, server):
        self.require_acquire_fields = Remote(lambda: [])
        self.require_release_fields = Remote(lambda: [])
        self.acquired = []
        self.acquire_server = Remote(lambda request_id: (self.acquired.append(request_id), ("verl's", server))[1])
        self.released = []
        self.release_server = SimpleNamespace(remote=lambda server_id: self.released.append(server_id))


class Lanes:
    """Grants every lane, until `last` requests have started: then HistoPipe has ended."""

    def __init__(self, server, last=100):
        self._server, self._left = server, last
        self.events = []

    async def lane(self, answer):
        return GrantedLane(answer, "one", self._server) if self._left else None

    def start(self, answer):
        self._left -= 1
        self.events.append(("start", answer))

    def stop(self, answer):
        self.events.append(("stop", answer))


async def generate(client, answer, prompt=(1, 2, 3)):
    if answer is not None:
        running_answer.set(RunningAnswer(answer))
    return await client.generate("verl-id", prompt_ids=list(prompt), sampling_params={"max_tokens": 8})


def test_a_nested_prompt_is_flattened_as_by_verl():
    server = Server()
    asyncio.run(generate(routed(FullyAsyncLLMServerClient(CONFIG, Balancer(server))), ("uid", 5), ([1, 2, 3],)))
    ((request_id, prompt), _) = server.requests
    assert prompt == [1, 2, 3] and tag_of(request_id).prompt_tokens == 3


def test_an_interrupted_answer_keeps_its_identity_and_the_length_of_its_first_prompt():
    server = Server()
    client = routed(FullyAsyncLLMServerClient(CONFIG, Balancer(server)))
    output = asyncio.run(generate(client, ("uid", 5)))
    assert output.token_ids == [101, 102]
    assert [prompt for _, prompt in server.requests] == [[1, 2, 3], [1, 2, 3, 101]]
    tags = [tag_of(request_id) for request_id, _ in server.requests]
    assert tags == [RequestTag(("uid", 5), prompt_tokens=3)] * 2
    assert server.requests[0][0] != server.requests[1][0], "each request has an id of its own"


def test_the_next_turn_of_an_answer_is_known_by_its_first_prompt():
    server = Server()
    client = routed(LLMServerClient(CONFIG, Balancer(server)))

    async def turns():
        await generate(client, ("uid", 0))
        await generate(client, None, prompt=(1, 2, 3, 101, 7))

    asyncio.run(turns())
    assert [tag_of(request_id).prompt_tokens for request_id, _ in server.requests] == [3, 3]


def test_a_rewritten_context_keeps_its_lane_but_not_the_first_prompt():
    server = Server()
    client = routed(LLMServerClient(CONFIG, Balancer(server)))

    async def requests():
        await generate(client, ("uid", 0))
        await generate(client, None, prompt=(9, 9))

    asyncio.run(requests())
    assert [tag_of(request_id).prompt_tokens for request_id, _ in server.requests] == [3, 0]


def test_requests_of_an_answer_go_to_the_replica_of_its_lane():
    server, balancer = Server(), Balancer(Server())
    lanes = Lanes(server)
    client = routed(routed(FullyAsyncLLMServerClient(CONFIG, balancer)), lanes)
    asyncio.run(generate(client, ("uid", 1)))
    assert lanes.events == [("start", ("uid", 1)), ("stop", ("uid", 1))] * 2
    assert tag_of(server.requests[0][0]) == RequestTag(("uid", 1), prompt_tokens=3)
    assert not balancer.acquired


def test_requests_of_no_answer_are_left_to_verls_client():
    server = Server()
    balancer = Balancer(server)
    client = routed(LLMServerClient(CONFIG, balancer), Lanes(Server()))
    asyncio.run(generate(client, None))
    assert len(server.requests) == len(balancer.acquired) == 1
    assert tag_of(server.requests[0][0]) is None


def test_verls_client_finds_a_replica_when_histopipe_has_ended():
    """The first request is aborted; its lane is reported to be free, and the second asks verl's load balancer."""
    server = Server()
    balancer, lanes = Balancer(server), Lanes(server, last=1)
    output = asyncio.run(generate(routed(FullyAsyncLLMServerClient(CONFIG, balancer), lanes), ("uid", 1)))
    assert output.token_ids == [101, 102]
    assert lanes.events == [("start", ("uid", 1)), ("stop", ("uid", 1))]
    assert len(balancer.acquired) == 1 and balancer.released == ["verl's"]
    assert tag_of(server.requests[1][0]) == RequestTag(("uid", 1), prompt_tokens=3)
