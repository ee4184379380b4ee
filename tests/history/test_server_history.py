"""A rollout server's part in the history, with real Ray actors and a real subscriber in the engine's place."""

import asyncio
import logging
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError
from rhyme_verl._core import prompt_key

from rhyme_verl.config import HistoryConfig
from rhyme_verl.history import feed
from rhyme_verl.history.feed import AnswerSubscriber, FeedAddress, own_keys
from rhyme_verl.history.server_history import ENGINE_BYTES_PER_TOKEN, SPEAKERS, ReplicaHistory, is_speaker
from rhyme_verl.history.vocabulary import Vocabulary
from rhyme_verl.request_id import RequestTag
from tests.helpers.ray_node import start_ray
from tests.helpers.tcp_proxy import TcpProxy

pytestmark = pytest.mark.usefixtures("patient_clients")

PROMPT = np.array([1, 2, 3], np.int32)
KEY = prompt_key(PROMPT)
OPENED = []  # Ray ends an actor some time after the one who started it is gone, maybe in the middle of the next test
VOCABULARY = Vocabulary(size=1000, fingerprint="0123456789abcdef")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    start_ray(num_cpus=2)
    yield
    OPENED.clear()
    ray.shutdown()


class Engine:
    """Holds what the feed brings, as an engine's index would."""

    def __init__(self, address):
        self.updates = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self._subscriber = AnswerSubscriber(address, self._take)

    @staticmethod
    async def of(replica, port=None):
        """The replica's engine; `port`: at which it reaches the replica, instead of its own."""
        engines = []

        async def call_workers(method, *arguments):
            if method == "rhyme_feed_key":
                return [own_keys()[0].decode()]
            address = FeedAddress(**arguments[0])
            if port is not None:
                address = FeedAddress(f"tcp://127.0.0.1:{port}", address.key)
            engines.append(await asyncio.to_thread(Engine, address))
            return [True]

        assert await replica.bind(call_workers) == [True]
        return engines[0]

    def _take(self, *update):
        self.goes_on.wait()
        self.updates.append(update)

    async def answers_of(self, key, count):
        """The prompt's answers by id, once there are `count`; fails after 20 s."""
        deadline = time.monotonic() + 20
        while True:
            found = {}
            for update_key, tokens, lengths, _, ids in list(self.updates):
                if update_key == key:
                    texts = np.split(tokens, np.cumsum(lengths)[:-1])
                    found |= {int(name): text.tolist() for name, text in zip(ids, texts, strict=True)}
            if len(found) == count:
                return found
            assert time.monotonic() < deadline, found
            await asyncio.sleep(0.02)

    def close(self):
        self._subscriber.close()


def replica_history(host=None, **settings):
    OPENED.append(ReplicaHistory(HistoryConfig(**settings), VOCABULARY, host))
    return OPENED[-1]


def finish(replica, prompt, answer, step):
    replica.end(replica.begin(prompt, step), prompt, np.array(answer, np.int32), step)


@pytest.mark.parametrize("first", [0, 1, 4, 7])
@pytest.mark.parametrize("num_standalone", [1, 3, 8, 30, 1024])
def test_a_few_of_the_replicas_that_hear_of_every_step_tell_the_store(first, num_standalone):
    """Ranks of standalone replicas begin after those of the trainer's, of which verl may tell none."""
    found = sum(is_speaker(first + rank, num_standalone) for rank in range(num_standalone))
    assert min(SPEAKERS, num_standalone) <= found < 2 * SPEAKERS
    assert [is_speaker(rank, 0) for rank in range(6)] == [True] * SPEAKERS + [False] * 2


def test_prompts_without_answers_are_forgotten_with_the_step():
    async def scenario():
        replica, prompt = replica_history(), np.array([1, 2, 4], np.int32)
        engine = await Engine.of(replica)
        finish(replica, prompt, [10], step=0)
        for token in range(100):
            replica.begin(np.array([50, token], np.int32), step=0)
        await replica.finish_step(1)
        replica.begin(prompt, step=1)
        await engine.answers_of(prompt_key(prompt), 1)
        replica.begin(np.array([60], np.int32), step=1)
        await replica.finish_step(2, tells_store=False)
        assert list(replica._fetched) == [prompt_key(prompt)]
        engine.close()

    asyncio.run(scenario())


def test_a_tagged_request_is_known_by_its_tag_on_any_replica():
    """An answer is begun on one replica, aborted, and goes on elsewhere, where nothing is known of its beginning."""

    async def scenario():
        first, second, third = replica_history(), replica_history(), replica_history()
        engine = await Engine.of(third)
        prompt, tag = np.array([7, 7, 7], np.int32), RequestTag(("uid", 3), prompt_tokens=3)
        begun = first.begin(prompt, 0, tag)
        first.end(begun, prompt, np.array([20, 21], np.int32), 0)
        await first.finish_step(0)
        longer = np.append(prompt, [20, 21]).astype(np.int32)
        resumed = second.begin(longer, 1, tag)
        second.end(resumed, longer, np.array([22], np.int32), 1)
        await second.finish_step(1)
        third.begin(prompt, 1)
        found = await engine.answers_of(prompt_key(prompt), 1)
        assert found == {tag.answer_key: [20, 21, 22]}
        engine.close()

    asyncio.run(scenario())


def test_any_replica_gets_what_any_replica_has_produced_and_only_what_is_new():
    async def scenario():
        first, second = replica_history(), replica_history()
        engine = await Engine.of(second)
        before = (await first.counters()).tokens
        for answer in ([10, 11], [12]):
            finish(first, PROMPT, answer, step=0)
        await first.finish_step(1)
        assert (await first.counters()).tokens == before + 3
        for _ in range(8):  # one group: one fetch
            second.begin(PROMPT, step=1)
        second.begin(np.array([9], np.int32), step=1)  # never seen before
        found = await engine.answers_of(KEY, 2)
        assert sorted(found.values()) == [[10, 11], [12]]
        finish(first, PROMPT, [13], step=1)
        await first.finish_step(2)
        second.begin(PROMPT, step=1)  # asked already in this step
        await asyncio.sleep(0.3)
        assert len(engine.updates) == 1
        second.begin(PROMPT, step=2)
        found = await engine.answers_of(KEY, 3)
        assert [13] in found.values()
        assert engine.updates[-1][2].tolist() == [1], "only the new answer was sent"
        engine.close()

    asyncio.run(scenario())


def test_a_later_turn_and_a_resumed_request_extend_the_answer_to_the_first_prompt():
    async def scenario():
        replica = replica_history()
        engine = await Engine.of(replica)
        root = np.array([4, 5], np.int32)
        finish(replica, root, [20, 21], step=0)
        finish(replica, np.array([4, 5, 20, 21, 90], np.int32), [22], step=0)  # 90: from a tool
        finish(replica, np.array([4, 5, 20, 21, 90, 22], np.int32), [23, 24], step=0)  # resumed
        await replica.finish_step(1)
        replica.begin(root, step=1)
        found = await engine.answers_of(prompt_key(root), 1)
        assert list(found.values()) == [[20, 21, 90, 22, 23, 24]]
        engine.close()

    asyncio.run(scenario())


def test_a_prompt_that_the_engine_may_have_evicted_is_fetched_whole_again():
    async def scenario():
        replica = replica_history(replica_budget_gib=100 * ENGINE_BYTES_PER_TOKEN / 2**30)
        engine = await Engine.of(replica)
        roots = [np.array([8, root], np.int32) for root in range(3)]
        for step in range(2):
            for root in roots:
                finish(replica, root, [step] * 45, step)
            await replica.finish_step(step + 1)
            for root in roots:  # three prompts of 45 tokens: one too many
                replica.begin(root, step + 1)
                await engine.answers_of(prompt_key(root), step + 1)
        lengths = [update[2].tolist() for update in engine.updates]
        assert lengths[:3] == [[45]] * 3
        assert [45, 45] in lengths[3:]
        engine.close()

    asyncio.run(scenario())


def test_what_an_engine_could_not_take_is_fetched_again(monkeypatch, caplog):
    monkeypatch.setattr(feed, "MAX_QUEUED", 1)

    async def scenario():
        producer, replica = replica_history(), replica_history()
        engine = await Engine.of(replica)
        roots = [np.array([9, root], np.int32) for root in range(20)]
        for root in roots:
            finish(producer, root, [5] * 100_000, step=0)
        await producer.finish_step(1)
        engine.goes_on.clear()
        for root in roots:
            replica.begin(root, step=1)
        while "answers do not reach the engine" not in caplog.text or replica._fetcher is not None:
            await asyncio.sleep(0.01)
        engine.goes_on.set()
        assert len(replica._fetched) < 20
        while len({key for key, *_ in engine.updates}) < 20:
            for root in roots:
                replica.begin(root, step=1)
            await asyncio.sleep(0.01)
        assert replica._num_fetched_tokens == 20 * 100_000
        engine.close()
        replica._publisher.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(asyncio.wait_for(scenario(), 60))


def test_an_engine_that_was_disconnected_gets_all_answers_again(monkeypatch):
    monkeypatch.setattr(feed, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(feed, "SILENT_SECONDS", 2.0)

    async def scenario():
        replica = replica_history(host="127.0.0.1")
        proxy = TcpProxy(int(replica._publisher.address.endpoint.rpartition(":")[2]))
        engine = await Engine.of(replica, proxy.port)
        root, step = np.array([10, 1], np.int32), 1
        finish(replica, root, [40], step=0)
        await replica.finish_step(1)
        while not engine.updates:  # the connection may fall silent on a busy machine, too
            replica.begin(root, step := step + 1)
            await asyncio.sleep(0.01)
        num_updates = len(engine.updates)
        proxy.flows.clear()
        while not replica._publisher._num_disconnected:
            await asyncio.sleep(0.01)
            replica.begin(root, step := step + 1)
        proxy.flows.set()
        while len(engine.updates) == num_updates:
            await asyncio.sleep(0.01)
            replica.begin(root, step := step + 1)
        assert engine.updates[-1][1].tolist() == [40]
        engine.close()
        replica._publisher.close()
        proxy.close()

    asyncio.run(asyncio.wait_for(scenario(), 60))


def test_a_request_that_is_rejected_before_its_first_token_may_come_again_as_itself():
    async def scenario():
        replica = replica_history()
        engine = await Engine.of(replica)
        root, longer = np.array([11, 1], np.int32), np.array([11, 1, 50, 90], np.int32)
        finish(replica, root, [], step=0)
        finish(replica, root, [50], step=0)
        finish(replica, longer, [], step=0)
        finish(replica, longer, [51], step=0)
        await replica.finish_step(1)
        replica.begin(root, step=1)
        assert list((await engine.answers_of(prompt_key(root), 1)).values()) == [[50, 90, 51]]
        engine.close()

    asyncio.run(scenario())


def test_while_the_store_is_down_requests_go_on_and_its_news_come_later():
    async def scenario():
        replica = replica_history()
        engine = await Engine.of(replica)
        root = np.array([6, 7], np.int32)
        finish(replica, root, [30], step=0)
        await replica._client.drain(30)
        await replica.finish_step(1)
        actor = ray.get_actor("rhyme_history_0123456789abcdef_1000_0_of_1")
        ray.kill(actor)  # for good: its memory is gone
        with pytest.raises(ActorDiedError):  # it may respond for a moment
            while True:
                with suppress(ActorUnavailableError):
                    await actor.counters.remote()
        replica.begin(root, step=1)
        finish(replica, root, [31], step=1)
        deadline = time.monotonic() + 120
        while await replica.counters() is None:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)
        await replica.finish_step(2)
        replica.begin(root, step=2)
        while not engine.updates or engine.updates[-1][1].tolist() != [31]:  # it may have got the first one, too
            await asyncio.sleep(0.01)
        engine.close()

    asyncio.run(asyncio.wait_for(scenario(), 180))
