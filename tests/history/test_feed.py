"""Answers on their way from the server to the engine."""

import asyncio
import logging
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
import zmq

from rhyme_verl.history import feed
from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.feed import AnswerPublisher, AnswerSubscriber, FeedAddress, FeedError, own_keys
from tests.helpers.core import new_index
from tests.helpers.tcp_proxy import TcpProxy
from tests.helpers.waiting import wait_for


def batch(prompt_key, *answers):
    """Answers given as (id, rollout, token ids)."""
    held = [Answer(name, 0, np.array(text, np.int32).tobytes(), rollout=rollout) for name, rollout, text in answers]
    return AnswerBatch.of(prompt_key, 0, held)


def subscribe(publisher, *takers, address=None):
    """One subscriber per function of `takers`, as the engines of one server."""

    async def subscribing():
        address_ = publisher.address if address is None else address
        return await asyncio.gather(*(asyncio.to_thread(AnswerSubscriber, address_, take) for take in takers))

    async def accepting():
        return await publisher.accept(subscribing())

    publisher.allow([own_keys()[0].decode()])
    return asyncio.run(accepting())


def path_of(publisher):
    return Path(publisher.address.endpoint.removeprefix("ipc://"))


@pytest.mark.parametrize("host", [None, "127.0.0.1", "::1"])
def test_every_subscriber_gets_every_batch_whole_and_in_order(host):
    publisher = AnswerPublisher(host)
    assert publisher.address.endpoint.startswith("ipc://" if host is None else "tcp://")
    received = [[], []]
    subscribers = subscribe(publisher, *(lambda *update, box=box: box.append(update) for box in received))
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


def test_a_unix_socket_is_closed_to_others_and_gone_when_the_engines_have_subscribed():
    publisher, unused = AnswerPublisher(), AnswerPublisher()
    folder = path_of(publisher).parent
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700 and list(folder.iterdir()) == [path_of(publisher)]
    (subscriber,) = subscribe(publisher, print)
    assert not folder.exists()
    subscriber.close()
    publisher.close()
    unused.close()
    assert not path_of(unused).parent.exists()


def test_a_subscriber_that_is_not_greeted_says_where_it_looked(tmp_path):
    address = FeedAddress(f"ipc://{tmp_path}/nobody.sock")
    with pytest.raises(FeedError, match="does not publish answers at ipc://.*/nobody.sock"):
        AnswerSubscriber(address, print, greeting_seconds=0.2)


@pytest.mark.parametrize("knows", ["nothing", "another key", "the publisher's key"])
def test_over_tcp_nobody_listens_without_the_publishers_key_and_one_that_it_knows(knows):
    publisher = AnswerPublisher("127.0.0.1")
    stranger = zmq.curve_keypair()[0].decode()
    publisher.allow([stranger] if knows == "the publisher's key" else [own_keys()[0].decode()])
    keys = {"nothing": None, "another key": stranger, "the publisher's key": publisher.address.key}
    address = FeedAddress(publisher.address.endpoint, keys[knows])

    async def listen():
        with pytest.raises(FeedError, match="does not accept this engine's key"):
            await publisher.accept(asyncio.to_thread(AnswerSubscriber, address, print, greeting_seconds=1.0))

    asyncio.run(listen())
    publisher.close()


def test_a_bad_message_is_dropped_and_said_once_and_the_feed_goes_on(caplog):
    publisher, index = AnswerPublisher(), new_index()
    (subscriber,) = subscribe(publisher, index.update)
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
    subscribe(publisher, print)[0].close()
    publisher.close()


def test_a_publisher_that_cannot_send_says_so_once_and_raises_nothing(caplog):
    publisher = AnswerPublisher()
    publisher.close()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            assert not publisher.publish(batch(1, (1, 0, [5])))
    assert caplog.text.count("answers do not reach the engine") == 1


def test_the_queue_of_an_engine_that_takes_nothing_is_bounded(caplog, monkeypatch):
    monkeypatch.setattr(feed, "MAX_QUEUED", 4)
    publisher, received, goes_on = AnswerPublisher(), [], threading.Event()

    def take(key, *columns):
        goes_on.wait()
        received.append(key)

    (subscriber,) = subscribe(publisher, take)
    large = [(1, 0, range(50_000))]
    with caplog.at_level(logging.ERROR):
        sent = [publisher.publish(batch(key, *large)) for key in range(100)]
    assert sent.count(True) < 30 and not sent[-1]
    assert caplog.text.count("answers do not reach the engine, which drafts without them: 4 batches are waiting") == 1
    goes_on.set()
    wait_for(lambda: len(received) == sent.count(True))
    assert received == [key for key, is_sent in enumerate(sent) if is_sent], "what was accepted arrives"
    assert publisher.publish(batch(200, *large)) and not publisher.has_lost_answers()
    subscriber.close()
    publisher.close()


def test_a_connection_that_falls_silent_is_closed_noticed_and_opened_again(caplog, monkeypatch):
    monkeypatch.setattr(feed, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(feed, "SILENT_SECONDS", 2.0)
    publisher, received = AnswerPublisher("127.0.0.1"), []
    proxy = TcpProxy(int(publisher.address.endpoint.rpartition(":")[2]))
    address = FeedAddress(f"tcp://127.0.0.1:{proxy.port}", publisher.address.key)
    (subscriber,) = subscribe(publisher, lambda key, *columns: received.append(key), address=address)
    publisher.publish(batch(1, (1, 0, [5])))
    wait_for(lambda: received == [1])
    assert not publisher.has_lost_answers()
    proxy.flows.clear()
    with caplog.at_level(logging.WARNING):
        wait_for(publisher.has_lost_answers)
        proxy.flows.set()
        wait_for(publisher.has_lost_answers)  # connected again: what was sent meanwhile is lost
    assert not publisher.has_lost_answers()
    assert caplog.text.count("an engine was disconnected") == 1
    publisher.publish(batch(2, (2, 0, [5])))
    wait_for(lambda: received[-1] == 2)
    subscriber.close()
    publisher.close()
    proxy.close()
