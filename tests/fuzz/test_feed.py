"""The feed: whatever messages arrive, the engine's index stays sound and gets the next good batch whole."""

import asyncio
from queue import SimpleQueue

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.feed import AnswerPublisher, AnswerSubscriber
from tests.fuzz.fuzzing import any_changes, damaged, fuzzed
from tests.helpers.core import new_index

MAX_BYTES = 1 << 20

uint64 = st.integers(0, 2**64 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
texts = st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda text: np.array(text, np.int32).tobytes())
batches = st.builds(AnswerBatch.of, uint64, st.just(0), st.lists(st.builds(Answer, uint64, int64, texts), max_size=4))
damages = st.lists(st.tuples(batches, st.integers(0, 4), st.integers(0, 2), any_changes), max_size=3)
any_frames = st.lists(st.binary(max_size=40), min_size=1, max_size=7)


def columns(batch):
    return batch.tokens, batch.lengths, batch.rollouts, batch.ids


@pytest.fixture(scope="module")
def feed():
    index, arrived = new_index(max_bytes=MAX_BYTES), SimpleQueue()

    def take(key, *arrays):
        index.update(key, *arrays)
        arrived.put((key, [array.tolist() for array in arrays]))

    publisher = AnswerPublisher()
    subscriber = asyncio.run(publisher.accept(asyncio.to_thread(AnswerSubscriber, publisher.address, take)))
    yield publisher, index, arrived
    subscriber.close()
    publisher.close()


@fuzzed(150)
@given(damages, any_frames, batches)
def test_a_good_batch_arrives_whole_after_any_messages(feed, damages, frames, good):
    publisher, index, arrived = feed
    for batch, which, num_copies, changes in damages:
        message = [batch.prompt_key.to_bytes(8, "little"), *(column.tobytes() for column in columns(batch))]
        message[which : which + 1] = [damaged(message[which], changes)] * num_copies
        publisher._socket.send_multipart(message)
    publisher._socket.send_multipart(frames)
    publisher.publish(good)
    sent = (good.prompt_key, [column.tolist() for column in columns(good)])
    while arrived.get(timeout=10) != sent:
        pass
    assert index.check_integrity() == ""
    stats = index.stats()
    assert stats.num_bytes <= MAX_BYTES or stats.num_prompts == 1
