"""Notices the death of a Ray actor without asking it repeatedly, and ends one that does not respond."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

OWNER_DIED = "owner has died"  # part of Ray's error when the job ends
RETRY_SECONDS = 5.0


async def death_of(stay: Any) -> str | None:
    """Wait until an actor dies, on a method of it that never returns.

    Returns:
        The first line of Ray's error; None if the actor ended together with its job.
    """
    while True:
        try:
            await stay.remote()
            return None
        except ActorUnavailableError:  # the network, for example; it may be alive
            await asyncio.sleep(RETRY_SECONDS)
        except RayActorError as error:
            reason = str(error)
            return None if OWNER_DIED in reason else reason.partition("\n")[0]


def end(actor: Any) -> None:
    """End an actor that a caller gives up, so that its other callers do the same."""
    with contextlib.suppress(Exception):
        ray.kill(actor)
