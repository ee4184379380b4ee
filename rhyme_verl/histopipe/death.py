"""Calls Ray actors through network failures, notices their death, and ends one that a caller gives up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

OWNER_DIED = "owner has died"  # part of Ray's error when the job ends
RETRY_SECONDS = 1.0


async def reach(method: Any, *arguments: Any, **named: Any) -> Any:
    """Call an actor's method, and again after a network failure, so that the actor may run the call twice.

    Raises:
        ray.exceptions.RayError: the actor is dead, or the method has failed.
    """
    while True:
        try:
            return await method.remote(*arguments, **named)
        except ActorUnavailableError:
            await asyncio.sleep(RETRY_SECONDS)


def reach_and_wait(method: Any, *arguments: Any, **named: Any) -> Any:
    """Call an actor's method as `reach` does, outside of an event loop."""
    while True:
        try:
            return ray.get(method.remote(*arguments, **named))
        except ActorUnavailableError:
            time.sleep(RETRY_SECONDS)


async def death_of(stay: Any) -> str | None:
    """Wait until an actor dies, on a method of it that never returns.

    Returns:
        The first line of Ray's error; None if the actor ended together with its job.
    """
    try:
        await reach(stay)
        return None
    except RayActorError as error:
        reason = str(error)
        return None if OWNER_DIED in reason else reason.partition("\n")[0]


def end(actor: Any) -> None:
    """End an actor that a caller gives up, so that its other callers do the same."""
    with contextlib.suppress(Exception):
        ray.kill(actor)
