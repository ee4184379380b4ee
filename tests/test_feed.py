"""Answers on their way from the server to the engine."""

import logging
import os
import time

import numpy as np

from rhyme_verl.history.answers import Answer, AnswerBatch
from rhyme_verl.history.feed import AnswerPublisher, AnswerSubscriber


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def batch(prompt_key, *answers):
    """Answers given as (id, step, reward, token ids)."""
    held = [Answer(name, step, np.array(text, np.int32).tobytes(), 0, reward) for name, step, reward, text in answers]
    return AnswerBatch.of(prompt_key, 0, held)


def test_every_subscriber_gets_every_batch_whole_and_in_order():
    publisher = AnswerPublisher()
    received = [[], []]

    def subscribe(box):
        return AnswerSubscriber(publisher.endpoint, lambda *update: box.append(update))

    subscribers = [subscribe(box) for box in received]
    hello = batch(2**64 - 1, (2**64 - 1, 7, 0.5, [1, 2]), (5, -1, float("nan"), []))
    while not all(received):  # a subscription takes a moment to reach the publisher
        publisher.publish(hello)
        time.sleep(0.01)
    key, *columns = received[0][0]
    assert key == 2**64 - 1
    assert [column.dtype for column in columns] == [np.int32, np.int32, np.int64, np.float32, np.uint64]
    assert [column.tolist() for column in columns[:3]] == [[1, 2], [2, 0], [7, -1]]
    assert str(columns[3].tolist()) == "[0.5, nan]"
    assert columns[4].tolist() == [2**64 - 1, 5]
    for index in range(200):
        publisher.publish(batch(index, *((name, index, 0.0, range(name)) for name in range(1, index % 7 + 2))))
    for box in received:
        wait_for(lambda box=box: box[-1][0] == 199)
        sent = [update for update in box if update[0] != hello.prompt_key]
        assert [update[0] for update in sent] == list(range(200))
        assert sent[6][1].tolist() == [token for name in range(1, 8) for token in range(name)]
    for subscriber in subscribers:
        subscriber.close()
    publisher.close()
    assert not os.path.exists(publisher.endpoint.removeprefix("ipc://"))


def test_a_publisher_that_cannot_send_says_so_once_and_raises_nothing(caplog):
    publisher = AnswerPublisher()
    publisher.close()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            publisher.publish(batch(1, (1, 0, 0.0, [5])))
    assert caplog.text.count("answers do not reach the engine") == 1
