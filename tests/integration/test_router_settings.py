"""What the router sees of verl's table of groups."""

from rhyme_verl.integration import router_settings
from rhyme_verl.integration.router_settings import TransferQueueTable


def test_finished_groups_and_published_ones_that_have_not_failed_are_available(monkeypatch):
    tags = {
        "finished": {"is_prompt": True, "status": "finished"},
        "running": {"is_prompt": True, "status": "running"},
        "published": {"is_prompt": True, "status": "running"},
        "failed": {"is_prompt": True, "status": "failure"},
        "finished_0_0": {"status": "finished"},  # an answer
    }
    monkeypatch.setattr(router_settings.tq, "init", lambda: None)
    monkeypatch.setattr(router_settings.tq, "kv_list", lambda *_: {"train": tags})
    published = {"published", "failed", "taken"}
    assert TransferQueueTable().available(published) == {"finished", "published"}
    monkeypatch.setattr(router_settings.tq, "kv_list", lambda *_: None)
    assert TransferQueueTable().available(published) == set()
