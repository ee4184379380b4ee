"""Implements verl's load balancer protocol (`verl.workers.rollout.router.RequestLoadBalancer`) on the router's lanes.

It serves requests that belong to no known answer: each goes to the least loaded replica, as with verl's load balancer.
Requests of known answers do not call it, because the news of their lane already names the replica.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rhyme_verl.histopipe.scheduler import Scheduler


class LoadBalancer:
    """The part of the router that verl's own client calls.

    Args:
        servers: actor handles of the rollout servers, by replica name.
    """

    def __init__(self, servers: dict[str, Any], scheduler: Scheduler) -> None:
        self._handles = dict(servers)
        self._scheduler = scheduler

    async def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """Return a replica and its handle for a request that belongs to no known answer.

        Raises:
            RuntimeError: there is no replica.
        """
        name = self._scheduler.lanes.least_loaded()
        self._scheduler.lanes.replicas[name].others += 1
        return name, self._handles[name]

    async def release_server(self, server_id: str) -> None:
        found = self._scheduler.lanes.replicas.get(server_id)
        if found is not None:
            found.others = max(0, found.others - 1)

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def get_all_servers(self) -> list[str]:
        return list(self._scheduler.lanes.replicas)

    async def get_total_inflight(self) -> int:
        return sum(self._loads().values())

    async def clear_sticky_cache(self) -> dict[str, Any]:
        return {"cleared_entries": 0, "server_loads": self._loads()}

    async def get_status(self) -> dict[str, Any]:
        loads, units = self._loads(), self._scheduler.units
        return {
            "servers": loads,
            "total_inflight": sum(loads.values()),
            "active_servers": len(loads),
            "registered_handles": list(self._handles),
            "waiting": self._scheduler.lanes.waiting,
            "unopened_groups": units.waiting,
        }

    def _loads(self) -> dict[str, int]:
        return {name: replica.running + replica.others for name, replica in self._scheduler.lanes.replicas.items()}

    def _handles_of(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: self._handles[name] for name in names if name in self._handles}
