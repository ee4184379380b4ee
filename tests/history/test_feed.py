"""Answers on their way from the server to the engine."""

import asyncio
import logging
import os
import time

import numpy as np
import pytest
import zmq

from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.feed import AnswerPublisher, AnswerSubscriber, FeedAddress, FeedError
from tests.helpers.core import new_index


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def batch(prompt_key, *answers):
    """Answers given as (id, step, token ids)."""
    held = [Answer(name, step, np.array(text, np.int32).tobytes()) for name, step, text in answers]
    return AnswerBatch.of(prompt_key, 0, held)


def subscribe(publisher, on_answers):
    subscribing = asyncio.to_thread(AnswerSubscriber, publisher.address, on_answers)
    return asyncio.run(publisher.accept(subscribing))


@pytest.mark.parametrize("host", [None, "127.0.0.1", "::1"])
def test_every_subscriber_gets_every_batch_whole_and_in_order(host):
    publisher = AnswerPublisher(host)
    assert publisher.address.endpoint.startswith("ipc://" if host is None else "tcp://")
    received = [[], []]
    subscribers = [subscribe(publisher, lambda *update, box=box: box.append(update)) for box in received]
    publisher.publish(batch(2**64 - 1, (2**64 - 1, 7, [1, 2]), (5, -1, [])))
    wait_for(lambda: all(received))
    key, *columns = received[0][0]
    assert key == 2**64 - 1
    assert [column.dtype for column in columns] == [np.int32, np.int32, np.int64, np.uint64]
    assert [column.tolist() for column in columns] == [[1, 2], [2, 0], [7, -1], [2**64 - 1, 5]]
    for index in range(200):
        publisher.publish(batch(index, *((name, index, range(name)) for name in range(1, index % 7 + 2))))
    for box in received:
        wait_for(lambda box=box: box[-1][0] == 199)
        sent = box[1:]
        assert [update[0] for update in sent] == list(range(200))
        assert sent[6][1].tolist() == [token for name in range(1, 8) for token in range(name)]
    for subscriber in subscribers:
        subscriber.close()
    publisher.close()
    assert not os.path.exists(publisher.address.endpoint.removeprefix("ipc://"))


def test_a_subscriber_that_is_not_greeted_says_where_it_looked(tmp_path):
    address = FeedAddress(f"ipc://{tmp_path}/nobody.sock")
    with pytest.raises(FeedError, match="does not publish answers at ipc://.*/nobody.sock"):
        AnswerSubscriber(address, print, greeting_seconds=0.2)


@pytest.mark.parametrize("key", [None, zmq.curve_keypair()[0].decode()], ids=["none", "another"])
def test_over_tcp_nobody_listens_without_the_publishers_key(key):
    publisher = AnswerPublisher("127.0.0.1")
    address = FeedAddress(publisher.address.endpoint, key)

    async def listen():
        with pytest.raises(FeedError, match="does not accept this engine's key"):
            await publisher.accept(asyncio.to_thread(AnswerSubscriber, address, print, greeting_seconds=1.0))

    asyncio.run(listen())
    publisher.close()


def test_a_bad_message_is_dropped_and_said_once_and_the_feed_goes_on(caplog):
    publisher, index = AnswerPublisher(), new_index()
    subscriber = subscribe(publisher, index.update)
    with caplog.at_level(logging.ERROR):
        publisher.publish(batch(1, (1, 0, [1, -5, 3])))  # refused by the index
        publisher._socket.send_multipart([b"short"])
        publisher.publish(batch(2, (2, 0, [1, -5, 3])))
        publisher.publish(batch(3, (3, 0, [1, 2, 3])))
        wait_for(lambda: index.stats().num_answers == 1)
    assert caplog.text.count("answers that cannot be indexed are dropped") == 1
    subscriber.close()
    publisher.close()


def test_a_socket_path_that_would_be_too_long_is_made_elsewhere(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    publisher = AnswerPublisher()
    subscribe(publisher, print).close()
    publisher.close()


def test_a_publisher_that_cannot_send_says_so_once_and_raises_nothing(caplog):
    publisher = AnswerPublisher()
    publisher.close()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            publisher.publish(batch(1, (1, 0, [5])))
    assert caplog.text.count("answers do not reach the engine") == 1
