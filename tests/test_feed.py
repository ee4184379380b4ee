"""Finished answers on their way from the server to the engine."""

import os
import time

import numpy as np

from rhyme_verl.history.feed import AnswerPublisher, AnswerSubscriber


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_every_subscriber_gets_every_answer_whole_and_in_order():
    publisher = AnswerPublisher()
    received = [[], []]

    def subscribe(box):
        return AnswerSubscriber(publisher.endpoint, lambda key, answer, step: box.append((key, answer.tolist(), step)))

    subscribers = [subscribe(box) for box in received]
    hello = (2**64 - 1, [1], 0)  # a subscription takes a moment to reach the publisher
    while not all(received):
        publisher.publish(hello[0], np.array(hello[1], np.int32), hello[2])
        time.sleep(0.01)
    sent = [(index, list(range(index % 7 + 1)), index // 3) for index in range(200)]
    for key, answer, step in sent:
        publisher.publish(key, np.array(answer, np.int32), step)
    for box in received:
        wait_for(lambda box=box: len(box) and box[-1] == sent[-1])
        assert [one for one in box if one != hello] == sent
    for subscriber in subscribers:
        subscriber.close()
    publisher.close()
    assert not os.path.exists(publisher.endpoint.removeprefix("ipc://"))
