import pytest


@pytest.fixture
def patient_clients(monkeypatch):
    """On a busy machine an actor takes longer to start than a weight update would wait for it."""
    for name, seconds in (("CALL_SECONDS", 120.0), ("STEP_SECONDS", 60.0), ("DRAIN_SECONDS", 60.0)):
        monkeypatch.setattr(f"rhyme_verl.history.client.{name}", seconds)  # a name: some tests here run without Ray
