import pytest

from rhyme_verl.history import client


@pytest.fixture(autouse=True)
def patient_clients(monkeypatch):
    """On a busy machine an actor takes longer to start than a weight update would wait for it."""
    monkeypatch.setattr(client, "CALL_SECONDS", 120.0)
    monkeypatch.setattr(client, "STEP_SECONDS", 60.0)
    monkeypatch.setattr(client, "DRAIN_SECONDS", 60.0)
