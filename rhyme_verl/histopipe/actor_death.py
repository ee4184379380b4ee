"""Notices the death of a Ray actor."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError

OWNER_DIED = "owner has died"  # part of Ray's error when the job ends
RETRY_SECONDS = 1.0  # after a network failure


async def death_of(stay: Any) -> str | None:
    """Wait until an actor dies, on a method of it that never returns.

    Returns:
        The first line of Ray's error; None if the actor ended together with its job.
    """
    while True:
        try:
            await stay.remote()
            return None
        except ActorUnavailableError:
            await asyncio.sleep(RETRY_SECONDS)
        except RayActorError as error:
            reason = str(error)
            return None if OWNER_DIED in reason else reason.partition("\n")[0]
