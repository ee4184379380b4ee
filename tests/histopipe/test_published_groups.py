"""Counting in a table that lags."""

import asyncio

from rhyme_verl.histopipe import published_groups
from rhyme_verl.histopipe.published_groups import PublishedGroups


class Table:
    def __init__(self, *counts):
        self.counts = list(counts)
        self.failed = []

    def count_available(self):
        return self.counts.pop(0)

    def mark_failed(self, uids):
        self.failed += uids


def test_it_counts_once_the_table_shows_what_was_published():
    async def scenario():
        groups = PublishedGroups(Table(3))
        groups.publish("a")
        groups.publish("b")
        counting = asyncio.create_task(groups.count_available())
        groups.see("a")
        await asyncio.sleep(0.05)
        assert not counting.done()
        groups.see("b")
        assert await counting == 3

    asyncio.run(scenario())


def test_it_counts_again_if_more_is_published_meanwhile():
    async def scenario():
        table = Table(3, 4)
        groups = PublishedGroups(table)
        counting = asyncio.create_task(groups.count_available())
        await asyncio.sleep(0)  # the first count has begun
        groups.publish("late")
        groups.see("late")
        assert await counting == 4

    asyncio.run(scenario())


def test_a_group_that_never_shows_is_logged_once_and_not_waited_for_again(monkeypatch, caplog):
    monkeypatch.setattr(published_groups, "VISIBLE_SECONDS", 0.05)

    async def scenario():
        groups = PublishedGroups(Table(1, 2))
        for uid, count in (("a", 1), ("b", 2)):
            groups.publish(uid)
            assert await groups.count_available() == count

    asyncio.run(scenario())
    assert caplog.text.count("published groups") == 1


def test_without_a_table_nothing_is_available():
    async def scenario():
        groups = PublishedGroups()
        assert await groups.count_available() == 0
        await groups.mark_failed(["a"])

    asyncio.run(scenario())


def test_failed_groups_are_marked():
    async def scenario():
        table = Table()
        await PublishedGroups(table).mark_failed(["a", "b"])
        await PublishedGroups(table).mark_failed([])
        assert table.failed == ["a", "b"]

    asyncio.run(scenario())
