"""Request ids that say which trajectory a request belongs to; verl's own do not."""

from __future__ import annotations

Trajectory = tuple[str, int]  # uid of the prompt's rollout, sample

SEPARATOR = "|"


def tag(request_id: str, uid: str, sample: int) -> str:
    """Return a request id that names a trajectory."""
    return f"{request_id}{SEPARATOR}{sample}{SEPARATOR}{uid}"


def trajectory_of(request_id: str | None) -> Trajectory | None:
    """Return what `tag` put into a request id; None if it was not tagged."""
    parts = (request_id or "").split(SEPARATOR, 2)
    return (parts[2], int(parts[1])) if len(parts) == 3 and parts[1].isdigit() else None
