"""Checks of a running Ray cluster: each node's installation, shared folders, clock, and TCP ports between nodes.

An actor on each node, which takes no CPU slot, answers for it.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rhyme_verl.commands.doctor.finding import Finding, Verdict, fault, note, ok
from rhyme_verl.commands.doctor.installation import SHOWN, check_installation
from rhyme_verl.version import __version__, installed_version

CALL_SECONDS = 120.0  # a node may have to start its first worker process
CONNECT_SECONDS = 5.0
READ_SECONDS = 10.0  # for which a network file system may hide another node's new file
CLOCK_SECONDS = 1.0

Probes = dict[str, Any]  # the actor that answers for a node, by the node's label


def check_cluster(address: str, folders: Sequence[Path], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check all nodes of a running Ray cluster.

    Args:
        address: host and port of the cluster's head, as nodes use it to join.
        folders: must be the same on every node, and writable.
        environment: variables that the job sends to its processes, in addition to those of each node.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()  # Ray itself waits for long
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (RayError, OSError, RuntimeError, ValueError) as error:
        remedy = "give host:port of a running cluster, as `ray start` prints it for other nodes"
        yield fault("cluster", f"no Ray cluster answers at {address}: {error}", remedy)
        return
    try:
        probes = _start_probes()
        facts, failed = _ask({label: probe.facts.remote(dict(environment)) for label, probe in probes.items()})
        for label, reason in failed.items():
            remedy = "install rhyme_verl there as here, and see Ray's logs of that node"
            yield fault("cluster", f"{label} does not answer: {reason}", remedy)
            del probes[label]
        if not probes:
            return
        yield ok("cluster", f"{len(probes)} nodes answer: {', '.join(probes)}")
        yield from _installations(facts)
        yield from _clocks(probes)
        for folder in folders:
            yield from _folder(probes, folder)
        yield from _ports(probes)
    finally:
        ray.shutdown()


@ray.remote(num_cpus=0)
class _Probe:
    """Answers for one node."""

    def facts(self, environment: dict[str, str]) -> tuple[dict[str, str], list[Finding]]:
        """Return what should be the same on every node, and what is wrong with this node's installation."""
        names = ("verl", "vllm", *SHOWN)
        facts = {"rhyme_verl": __version__, "Python": platform.python_version()}
        facts |= {name: installed_version(name) or "missing" for name in names}
        facts["the folder of rhyme_verl"] = str(Path(import_module("rhyme_verl").__path__[0]))
        found = check_installation({**os.environ, **environment})
        return facts, [one for one in found if one.verdict is Verdict.FAULT]

    def clock(self) -> float:
        return time.time()

    def write(self, path: str) -> None:
        Path(path).write_text(path)

    def read(self, paths: list[str]) -> list[str]:
        """Return those files that this node does not find, or finds with another content."""
        deadline = time.monotonic() + READ_SECONDS
        while (missing := [path for path in paths if not _holds(path)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return missing

    def remove(self, path: str) -> None:
        Path(path).unlink(missing_ok=True)

    def listen(self) -> tuple[str, int]:
        """Listen at a port that the system chooses, as the feed of answers does; return the address."""
        host: str = ray.util.get_node_ip_address().strip("[]")  # type: ignore[no-untyped-call]
        self._socket = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return host, self._socket.getsockname()[1]

    def connect(self, address: tuple[str, int]) -> None:
        socket.create_connection(address, CONNECT_SECONDS).close()


def _holds(path: str) -> bool:
    try:
        return Path(path).read_text() == path
    except OSError:
        return False


def _start_probes() -> Probes:
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    probes = {}
    for node in sorted(alive, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        label = f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']}, {node['NodeID'][:6]})"
        probes[label] = _Probe.options(scheduling_strategy=here).remote()  # type: ignore[attr-defined]
    return probes


def _ask(calls: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Wait for one call per node; return the answers and the errors, each by the node's label."""
    deadline = time.monotonic() + CALL_SECONDS
    answers, failed = {}, {}
    for label, call in calls.items():
        try:
            answers[label] = ray.get(call, timeout=max(0.0, deadline - time.monotonic()))
        except (RayError, OSError) as error:  # OSError: of the call itself, as Ray raises it again
            text = str(error).strip() or type(error).__name__
            failed[label] = text.splitlines()[-1].strip()  # of a remote call, the last line says most
    return answers, failed


def _installations(nodes: Mapping[str, tuple[dict[str, str], list[Finding]]]) -> Iterator[Finding]:
    for label, (_, faults) in nodes.items():
        yield from (fault(one.check, f"{label}: {one.text}", one.remedy) for one in faults)
    names, _ = next(iter(nodes.values()))
    for name in names:
        found: dict[str, list[str]] = {}
        for label, (facts, _) in nodes.items():
            found.setdefault(facts[name], []).append(label)
        if len(found) == 1:
            continue
        text = f"{name} differs: " + "; ".join(f"{value} on {', '.join(labels)}" for value, labels in found.items())
        if name.startswith("the folder"):
            yield note("cluster", text, "nothing, if these are installations of the same version")
        else:
            yield fault("cluster", text, "install the same version on every node")
    if not any(faults for _, faults in nodes.values()):
        yield ok("cluster", f"installations compared: {', '.join(names)}")


def _clocks(probes: Probes) -> Iterator[Finding]:
    offsets = {}
    for label, probe in probes.items():
        before = time.time()
        for answer in _ask({label: probe.clock.remote()})[0].values():
            offsets[label] = answer - (before + time.time()) / 2
    if not offsets:
        return
    behind, ahead = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    difference = offsets[ahead] - offsets[behind]
    if difference > CLOCK_SECONDS:
        text = f"the clocks of {ahead} and {behind} differ by {difference:.1f} s"
        yield note("clocks", text, "synchronise them: nothing depends on it, but logs of several nodes do not line up")
    else:
        yield ok("clocks", f"differ by less than {CLOCK_SECONDS:.0f} s")


def _folder(probes: Probes, folder: Path) -> Iterator[Finding]:
    """Let every node write a file, the first one read all, and all read the first one's."""
    remedy = "give a folder that exists on a file system that all nodes share and can write to"
    if not folder.is_absolute():
        yield fault("folders", f"{folder} is relative, and nodes would look for it in different places", remedy)
        return
    token = f".rhyme-doctor-{secrets.token_hex(8)}"
    paths = {label: str(folder / f"{token}-{index}") for index, label in enumerate(probes)}
    _, failed = _ask({label: probes[label].write.remote(path) for label, path in paths.items()})
    faults = [
        fault("folders", f"{folder} cannot be written on {label}: {error}", remedy) for label, error in failed.items()
    ]
    writers = {path: label for label, path in paths.items() if label not in failed}
    first, every = list(writers)[:1], list(writers)
    reads = {label: probes[label].read.remote(every if path in first else first) for path, label in writers.items()}
    for label, missing in _ask(reads)[0].items():
        for path in missing:
            text = f"{folder} is not the same: {label} does not see what {writers[path]} writes"
            faults.append(fault("folders", text, remedy))
    _ask({label: probes[label].remove.remote(path) for path, label in writers.items()})
    yield from faults or [ok("folders", f"{folder} is shared and writable on all nodes")]


def _ports(probes: Probes) -> Iterator[Finding]:
    """Connect every node to its neighbours in a ring and to itself."""
    remedy = "open the TCP ports that the system chooses, between all nodes"
    addresses, failed = _ask({label: probe.listen.remote() for label, probe in probes.items()})
    faults = [fault("ports", f"{label} cannot listen: {error}", remedy) for label, error in failed.items()]
    ring = list(addresses)
    for shift in range(-1, min(2, len(ring) - 1)):
        peers = dict(zip(ring, ring[shift:] + ring[:shift], strict=True))
        _, failed = _ask({label: probes[label].connect.remote(addresses[peer]) for label, peer in peers.items()})
        for label, error in failed.items():
            text = f"{label} does not reach a port of {peers[label]}: {error}"
            faults.append(fault("ports", text, remedy))
    yield from faults or [ok("ports", "each node reaches ports of its neighbours, at the nodes' addresses")]
