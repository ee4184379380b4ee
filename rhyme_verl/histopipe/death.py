"""Notices the death of a Ray actor without asking it repeatedly."""

from __future__ import annotations

from typing import Any

from ray.exceptions import RayActorError

OWNER_DIED = "owner has died"  # part of Ray's error when the job ends


async def death_of(stay: Any) -> str | None:
    """Wait until an actor dies, on a method of it that never returns.

    Returns:
        The first line of Ray's error; None if the actor ended together with its job.
    """
    try:
        await stay.remote()
    except RayActorError as error:
        reason = str(error)
        return None if OWNER_DIED in reason else reason.partition("\n")[0]
    return None
