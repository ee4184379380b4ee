"""Implements verl's load balancer protocol (`verl.workers.rollout.router.RequestLoadBalancer`).

It serves the requests that have no lane: each goes to the replica with the fewest requests, as with verl's own load
balancer. It does not depend on HistoPipe's state, so it works before and after scheduling.
"""

from __future__ import annotations

from typing import Any


class LoadBalancer:
    """What verl itself calls. `servers`: actor handles of the rollout servers, by replica name."""

    def __init__(self, servers: dict[str, Any]) -> None:
        self._handles = dict(servers)
        self._num_acquired = dict.fromkeys(servers, 0)  # requests that have not been released, by replica

    async def acquire_server(self, request_id: str) -> tuple[str, Any]:
        """Return a replica and its handle for a request that has no lane.

        Raises:
            RuntimeError: there is no replica.
        """
        if not self._handles:
            raise RuntimeError("No available servers in load balancer")  # verl's client matches this text and waits
        loads = self._loads()
        name = min(loads, key=loads.__getitem__)
        self._num_acquired[name] += 1
        return name, self._handles[name]

    async def release_server(self, server_id: str) -> None:
        if self._num_acquired.get(server_id):
            self._num_acquired[server_id] -= 1

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def add_servers(self, servers: dict[str, Any]) -> None:
        self._handles.update(servers)
        self._num_acquired.update(dict.fromkeys(servers, 0))

    async def remove_servers(self, server_ids: list[str]) -> None:
        for name in server_ids:
            self._handles.pop(name, None)
            self._num_acquired.pop(name, None)

    async def get_all_servers(self) -> list[str]:
        return list(self._handles)

    async def get_total_inflight(self) -> int:
        return sum(self._loads().values())

    async def clear_sticky_cache(self) -> dict[str, Any]:
        return {"cleared_entries": 0, "server_loads": self._loads()}

    async def get_status(self) -> dict[str, Any]:
        loads, total = self._loads(), await self.get_total_inflight()
        names = list(self._handles)
        return {"servers": loads, "total_inflight": total, "active_servers": len(loads), "registered_handles": names}

    def _loads(self) -> dict[str, int]:
        """Return the number of running requests, by replica."""
        return dict(self._num_acquired)
