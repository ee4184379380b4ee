"""Request ids that carry an answer's identity and predicted length from the agent loop to the engine."""

from __future__ import annotations

AnswerId = tuple[str, int]  # uid of the group, sample

SEPARATOR = "|"


def tag(request_id: str, answer: AnswerId, predicted_tokens: float = 0.0) -> str:
    """Return `request_id` with an answer's identity; `predicted_tokens` 0 means that nothing is predicted."""
    uid, sample = answer
    return SEPARATOR.join((request_id, str(sample), str(round(predicted_tokens)), uid))


def answer_of(request_id: str | None) -> AnswerId | None:
    """Return the answer that `tag` put into a request id; None if the id is not tagged."""
    parts = _parts(request_id)
    return None if parts is None else (parts[3], int(parts[1]))


def predicted_tokens(request_id: str | None) -> int:
    """Return the predicted length that `tag` put into a request id; 0 if there is none."""
    parts = _parts(request_id)
    return 0 if parts is None else int(parts[2])


def _parts(request_id: str | None) -> list[str] | None:
    parts = (request_id or "").split(SEPARATOR, 3)
    return parts if len(parts) == 4 and parts[1].isdigit() and parts[2].isdigit() else None
