"""What each worker is told, and when."""

import asyncio

from rhyme_verl.histopipe.messages import Group
from rhyme_verl.histopipe.news_board import NewsBoard

GROUPS = [Group("a", 1, 2, 1), Group("b", 2, 2, 1)]


def board_with(worker_of):
    board = NewsBoard()
    board.add(GROUPS, is_validation=False)
    for uid, worker in worker_of.items():
        board.follow(worker, [uid])
    return board


def heard(board, worker, received=0):
    return asyncio.run(asyncio.wait_for(board.listen(worker, received), 5.0))


def test_news_of_a_group_waits_until_a_worker_has_it():
    board = board_with({})
    board.tell((("a", 0), "r1"))
    board.follow("w", ["a"])
    board.tell((("a", 1), "r2"))
    news, missing = heard(board, "w")
    assert news.lanes == [(("a", 0), "r1"), (("a", 1), "r2")]
    assert missing == {"r1", "r2"}


def test_each_worker_hears_of_its_own_groups_only():
    board = board_with({"a": "w1", "b": "w2"})
    board.tell((("a", 0), "r1"))
    board.tell((("b", 0), "r1"))
    assert heard(board, "w1")[0].lanes == [(("a", 0), "r1")]
    assert heard(board, "w2")[0].lanes == [(("b", 0), "r1")]


def test_handles_are_sent_once_and_again_after_a_replica_has_been_replaced():
    board = board_with({"a": "w"})
    for received, expected in enumerate(({"r1"}, set())):
        board.tell((("a", 0), "r1"))
        assert heard(board, "w", received)[1] == expected
    board.forget_replicas(["r1"])
    board.tell((("a", 1), "r1"))
    assert heard(board, "w", 2)[1] == {"r1"}


def test_news_that_was_not_received_is_sent_again_and_no_later_news_is_lost():
    async def play():
        board = board_with({"a": "w"})
        lost = asyncio.create_task(board.listen("w", 0))
        await asyncio.sleep(0)
        again = asyncio.create_task(board.listen("w", 0))
        board.tell((("a", 0), "r1"))
        assert (await lost)[0] is (await again)[0]
        board.tell((("a", 1), "r1"))
        first, second = (await board.listen("w", 0))[0], (await board.listen("w", 1))[0]
        assert [lane[0] for news in (first, second) for lane in news.lanes] == [("a", 0), ("a", 1)]

    asyncio.run(asyncio.wait_for(play(), 5.0))


def test_a_published_group_is_told_once_and_then_forgotten():
    board = board_with({"a": "w"})
    assert board.publish("a") and not board.publish("a")
    assert heard(board, "w")[0].published == ["a"]
    assert not board.publish("b"), "no worker has it"


def test_a_group_that_was_never_submitted_is_not_held_back():
    board = board_with({})
    board.follow("w", ["unknown"])
    assert heard(board, "w")[0].published == ["unknown"]


def test_a_dead_workers_groups_are_forgotten():
    board = board_with({"a": "w1", "b": "w2"})
    assert board.remove_groups_of("w1") == ["a"]
    assert not board.publish("a") and board.publish("b")
