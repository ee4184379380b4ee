"""Checks of a running Ray cluster: each node's installation, shared folders, clock, and TCP ports between nodes.

An actor on each node, which takes no CPU slot, answers for it.
"""

from __future__ import annotations

import logging
import platform
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class _Node:
    """One node of the cluster, and the actor that answers for it."""

    label: str
    probe: Any


def check_cluster(address: str, folders: Sequence[Path], environment: Mapping[str, str]) -> Iterator[Finding]:
    """Check all nodes of a running Ray cluster.

    Args:
        address: host and port of the cluster's head, as nodes use it to join.
        folders: must be the same on every node, and writable.
        environment: environment variables of the job.
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
        nodes = []
        for node, facts in _ask(_start_probes(), lambda node: node.probe.facts.remote(dict(environment))):
            if isinstance(facts, Exception):
                yield fault("cluster", f"{node.label} does not answer: {_line(facts)}",
                            "install rhyme_verl there as here, and see Ray's logs of that node")  # fmt: skip
            else:
                nodes.append((node, facts))
        yield ok("cluster", f"{len(nodes)} nodes answer: {', '.join(node.label for node, _ in nodes)}")
        yield from _installations(nodes)
        reached = [node for node, _ in nodes]
        yield from _clocks(reached)
        for folder in folders:
            yield from _folder(reached, folder)
        yield from _ports(reached)
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
        return facts, [one for one in check_installation(environment) if one.verdict is Verdict.FAULT]

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


def _start_probes() -> list[_Node]:
    alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes = []
    for node in sorted(alive, key=lambda node: (node["NodeManagerAddress"], node["NodeID"])):
        here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        label = f"{node['NodeManagerAddress']} ({node['NodeManagerHostname']}, {node['NodeID'][:6]})"
        nodes.append(_Node(label, _Probe.options(scheduling_strategy=here).remote()))  # type: ignore[attr-defined]
    return nodes


def _ask(nodes: Sequence[_Node], call: Callable[[_Node], Any]) -> list[tuple[_Node, Any]]:
    """Make a call on every node at once; return each node's answer, or the error."""
    calls = [call(node) for node in nodes]
    deadline = time.monotonic() + CALL_SECONDS
    answers: list[tuple[_Node, Any]] = []
    for node, one in zip(nodes, calls, strict=True):
        try:
            answers.append((node, ray.get(one, timeout=max(0.0, deadline - time.monotonic()))))
        except (RayError, OSError) as error:  # OSError: of the call itself, as Ray raises it again
            answers.append((node, error))
    return answers


def _line(error: Exception) -> str:
    """Return the line of an error that says most: of a remote call, the last one."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _installations(nodes: Sequence[tuple[_Node, tuple[dict[str, str], list[Finding]]]]) -> Iterator[Finding]:
    for node, (_, faults) in nodes:
        yield from (fault(one.check, f"{node.label}: {one.text}", one.remedy) for one in faults)
    names = nodes[0][1][0] if nodes else {}
    for name in names:
        found: dict[str, list[str]] = {}
        for node, (facts, _) in nodes:
            found.setdefault(facts[name], []).append(node.label)
        if len(found) == 1:
            continue
        text = f"{name} differs: " + "; ".join(f"{value} on {', '.join(labels)}" for value, labels in found.items())
        if name.startswith("the folder"):
            yield note("cluster", text, "nothing, if these are installations of the same version")
        else:
            yield fault("cluster", text, "install the same version on every node")
    if nodes and not any(faults for _, (_, faults) in nodes):
        yield ok("cluster", f"installations compared: {', '.join(names)}")


def _clocks(nodes: Sequence[_Node]) -> Iterator[Finding]:
    offsets = []
    for node in nodes:
        before = time.time()
        for _, answer in _ask([node], lambda node: node.probe.clock.remote()):
            if not isinstance(answer, Exception):
                offsets.append((answer - (before + time.time()) / 2, node))
    if not offsets:
        return
    (least, behind), (most, ahead) = min(offsets, key=lambda one: one[0]), max(offsets, key=lambda one: one[0])
    if most - least > CLOCK_SECONDS:
        text = f"the clocks of {ahead.label} and {behind.label} differ by {most - least:.1f} s"
        yield note("clocks", text, "synchronise them: nothing depends on it, but logs of several nodes do not line up")
    else:
        yield ok("clocks", f"differ by less than {CLOCK_SECONDS:.0f} s")


def _folder(nodes: Sequence[_Node], folder: Path) -> Iterator[Finding]:
    """Let every node write a file, the first one read all, and all read the first one's."""
    remedy = "give a folder on a file system that all nodes share and can write to"
    if not folder.is_absolute():
        yield fault("folders", f"{folder} is relative, and nodes would look for it in different places", remedy)
        return
    token = f".rhyme-doctor-{secrets.token_hex(8)}"
    paths = {node.label: str(folder / f"{token}-{index}") for index, node in enumerate(nodes)}
    faults = []
    for node, answer in _ask(nodes, lambda node: node.probe.write.remote(paths[node.label])):
        if isinstance(answer, Exception):
            faults.append(fault("folders", f"{folder} cannot be written on {node.label}: {_line(answer)}", remedy))
            del paths[node.label]
    writers = [node for node in nodes if node.label in paths]
    if writers:
        first, every = writers[0], list(paths.values())
        wanted = {node.label: every if node is first else [paths[first.label]] for node in writers}
        names = {path: label for label, path in paths.items()}
        for node, missing in _ask(writers, lambda node: node.probe.read.remote(wanted[node.label])):
            for path in [] if isinstance(missing, Exception) else missing:
                text = f"{folder} is not the same: {node.label} does not see what {names[path]} writes"
                faults.append(fault("folders", text, remedy))
        _ask(writers, lambda node: node.probe.remove.remote(paths[node.label]))
    yield from faults or [ok("folders", f"{folder} is shared and writable on all nodes")]


def _ports(nodes: Sequence[_Node]) -> Iterator[Finding]:
    """Connect every node to its neighbours in a ring and to itself."""
    remedy = "open the TCP ports that the system chooses, between all nodes"
    faults, listening = [], []
    for node, answer in _ask(nodes, lambda node: node.probe.listen.remote()):
        if isinstance(answer, Exception):
            faults.append(fault("ports", f"{node.label} cannot listen: {_line(answer)}", remedy))
        else:
            listening.append((node, answer))
    num = len(listening)
    for shift in sorted({shift % num for shift in (0, 1, -1)} if num else ()):
        peers = {node.label: listening[(index + shift) % num] for index, (node, _) in enumerate(listening)}
        callers = [node for node, _ in listening]
        for node, answer in _ask(callers, lambda node, to=peers: node.probe.connect.remote(to[node.label][1])):  # type: ignore[misc]
            if isinstance(answer, Exception):
                text = f"{node.label} does not reach a port of {peers[node.label][0].label}: {_line(answer)}"
                faults.append(fault("ports", text, remedy))
    yield from faults or [ok("ports", "each node reaches ports of its neighbours, at the nodes' addresses")]
