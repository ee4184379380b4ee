"""Several machines on one: each has its own network address, hostname, processes, /tmp, /dev/shm and HOME.

A machine is a set of Linux namespaces, held by one process. The namespaces, their processes, mounts and network devices
vanish with that process, which the kernel kills when this one ends, however it ends. So nothing is left to remove.

A bridge in a further namespace, the switch, connects the machines; a machine is cut off by taking down its port there,
and is far away if its frames come late or not at all (slow_cable.py).
All see the same folder at `SHARED`. Everything else, such as the Python environment and the kernels that have been
compiled, is this machine's.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PACKAGES = ("rhyme_verl", "tests", "benchmarks", "tools", "examples")
SHARED = Path("/mnt")
SLOW_CABLE = str(Path(__file__).with_name("slow_cable.py"))
ELSEWHERE = Path("/tmp/elsewhere")  # on a machine whose packages are at another path
PR_SET_PDEATHSIG = 1  # linux/prctl.h
GCS_PORT = 6399
CALL_SECONDS = 300.0
COMPILED = {  # once for all tests, in spite of the machines' own /tmp and HOME
    "TORCHINDUCTOR_CACHE_DIR": str(REPOSITORY / "runs/compiled/torchinductor"),
    "VLLM_CACHE_ROOT": str(REPOSITORY / "runs/compiled/vllm"),
}
RAY_ENVIRONMENT = {
    "RAY_AUTH_MODE": "disabled",  # of calls between nodes
    # A node that does not answer for 10 s to 25 s counts as dead, not after about a minute as by default.
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "5",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "30",  # a node ends that does not hear of Ray's head for so long
}


def obstacle():
    """Return why machines cannot be made here; None if they can."""
    missing = [tool for tool in ("unshare", "nsenter", "ip", "mount") if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    if os.geteuid() != 0:
        return "needs root"
    command = ["unshare", "--net", "--mount", "--pid", "--fork", "ip", "link", "add", "rhyme0", "type", "bridge"]
    tried = subprocess.run(command, capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no network namespaces: {tried.stderr.strip()}"


def _end_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


class _Namespaces:
    """A process that holds namespaces of its own, in which `script` has run."""

    def __init__(self, script):
        command = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child=SIGKILL",
                   "--mount-proc", "sh", "-ec", f"{script}\necho ready\nexec sleep infinity"]  # fmt: skip
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, preexec_fn=_end_with_parent
        )
        assert self._process.stdout.readline() == "ready\n", "the error is above"
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        self.pid = int(children.read_text().split()[0])

    def close(self):
        self._process.kill()
        self._process.wait()


class Machine:
    """One machine. `address` is its IPv4 address; `is_elsewhere`: its packages are at `ELSEWHERE`, not at this path."""

    def __init__(self, index, folder, shared, num_machines, is_elsewhere):
        self.index, self.address = index, address(index)
        self.packages = ELSEWHERE if is_elsewhere else REPOSITORY
        tmp, empty, hosts = folder / "tmp", folder / "empty", folder / "hosts"
        for made in (tmp / "home", tmp / "elsewhere", empty):
            made.mkdir(parents=True)
        hosts.write_text("127.0.0.1 localhost\n" + "".join(
            f"{address(other)} machine{other}\n" for other in range(num_machines)))  # fmt: skip
        script = [f"hostname machine{index}", f"mount --bind {hosts} /etc/hosts", "mount -t tmpfs tmpfs /dev/shm"]
        if is_elsewhere:
            for name in PACKAGES:
                (tmp / "elsewhere" / name).mkdir()
                script.append(f"mount --bind {REPOSITORY / name} {tmp / 'elsewhere' / name}")
            script += [f"mount --bind {empty} {REPOSITORY / name}" for name in PACKAGES]
        script += [f"mount --bind {shared} {SHARED}", f"mount --rbind {tmp} /tmp", "ip link set lo up"]
        self.namespaces = _Namespaces("\n".join(script))
        self._enter = ["nsenter", "-t", str(self.namespaces.pid), "-m", "-u", "-i", "-n", "-p", "--wd=/tmp", "--"]
        self._logs = folder

    def start(self, *command, log="log", **environment):
        """Start a command on this machine; its output is appended to a file of this name. Returns the process."""
        variables = {**os.environ, **RAY_ENVIRONMENT, **COMPILED, "HOME": "/tmp/home", "PYTHONPATH": str(self.packages)}
        variables.pop("TMPDIR", None)
        with open(self._logs / log, "ab") as output:
            return subprocess.Popen(
                [*self._enter, *map(str, command)],
                env={**variables, "RAY_ADDRESS": GCS, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def start_node(self, num_cpus, *options, **environment):
        """Start a Ray node, on the first machine Ray's head, which ends with the machine at the latest."""
        role = f"--address={GCS}" if self.index else f"--port={GCS_PORT}"
        head = () if self.index else ("--head", "--include-dashboard=false", "--temp-dir=/tmp/ray")
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats", "--block", role, *head]
        command = shlex.join([*ray, f"--node-ip-address={self.address}", f"--num-cpus={num_cpus}", *options])
        again = f"{command} || {command} || {command}"  # it may not come up in time on a busy machine
        return self.start("sh", "-c", again, log="ray", **environment, **({} if self.index else {"RAY_ADDRESS": ""}))

    def begin(self, function, *arguments):
        """Start a function of `tests.cluster.programs` in a process on this machine; `result` waits for it."""
        code = (
            "import json, sys\nfrom tests.cluster import programs\n"
            "print('result ' + json.dumps(getattr(programs, sys.argv[1])(*json.loads(sys.argv[2]))), flush=True)"
        )
        return self.start(sys.executable, "-c", code, function, json.dumps(arguments), log=function)

    def result(self, process, function, seconds=CALL_SECONDS):
        """Wait for a process of `begin` and return the function's result."""
        try:
            process.wait(seconds)
        finally:
            process.kill()
        lines = self.log(function).splitlines()
        assert process.returncode == 0, "\n".join(lines[-40:])
        return json.loads(next(line for line in reversed(lines) if line.startswith("result "))[7:])

    def call(self, function, *arguments, seconds=CALL_SECONDS):
        """Run a function of `tests.cluster.programs` in a process on this machine and return its result."""
        return self.result(self.begin(function, *arguments), function, seconds)

    def processes(self, title):
        """Return the titles of this machine's running processes that have `title` in theirs."""
        ps = subprocess.run([*self._enter, "ps", "-eo", "args"], capture_output=True, text=True, check=True)
        return [line for line in ps.stdout.splitlines() if title in line and "<defunct>" not in line]

    def log(self, name):
        path = self._logs / name
        return path.read_text(errors="replace") if path.exists() else ""

    def close(self):
        self.namespaces.close()


class Machines:
    """`num` machines and their switch. `shared` is the folder that they see at `SHARED`."""

    def __init__(self, num, folder, elsewhere=()):
        self.shared = folder / "shared"
        self.shared.mkdir(parents=True)
        network = f"ip addr add {address(-10)}/24 dev br0"
        self._switch = _Namespaces(f"ip link add br0 type bridge\n{network}\nip link set br0 up")
        self._cables = []
        self._all = []
        for index in range(num):
            machine = Machine(index, folder / f"machine{index}", self.shared, num, index in elsewhere)
            self._all.append(machine)
            self._in_switch(f"ip link add port{index} type veth peer name e0 netns {machine.namespaces.pid}")
            self._in_switch(f"ip link set port{index} master br0 up")
            # Ray finds a node's own address through its default route.
            for command in (f"addr add {machine.address}/24 dev e0", "link set e0 up",
                            f"route add default via {address(-10)}"):  # fmt: skip
                _run("nsenter", "-t", machine.namespaces.pid, "-n", "ip", *command.split())

    def __getitem__(self, index):
        return self._all[index]

    def __iter__(self):
        return iter(self._all)

    def cut(self, index):
        """Cut a machine off from all others."""
        self._in_switch(f"ip link set port{index} down")

    def join(self, index):
        """Connect a machine again."""
        self._in_switch(f"ip link set port{index} up")

    def slow(self, index, seconds, loss):
        """Delay the frames from and to a machine by so many seconds from now on, and lose this share of them."""
        for machine in self._all:
            _run("nsenter", "-t", machine.namespaces.pid, "-n", sys.executable, SLOW_CABLE, "prepare", "e0")
        port, near, far = f"port{index}", f"near{index}", f"far{index}"
        for command in (f"set {port} nomaster", f"add {near} type veth peer name {far}", f"set {far} master br0 up",
                        f"set {near} up"):  # fmt: skip
            self._in_switch(f"ip link {command}")
        enter = ("nsenter", "-t", str(self._switch.pid), "-n", sys.executable, SLOW_CABLE, "carry")
        cable = subprocess.Popen(
            [*enter, port, near, str(seconds), str(loss)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,
        )
        self._cables.append(cable)
        assert cable.stdout.readline() == "carries\n", "the error is above"

    def close(self):
        for machine in self._all:
            machine.close()
        for cable in self._cables:
            cable.kill()
            cable.wait()
        self._switch.close()

    def _in_switch(self, command):
        _run("nsenter", "-t", self._switch.pid, "-n", *command.split())


def address(index):
    return f"10.77.0.{11 + index}"


def _run(*command):
    subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True)


GCS = f"{address(0)}:{GCS_PORT}"  # the cluster's address


@contextmanager
def machines(num, folder, elsewhere=()):
    """Make machines and remove them at the end of the block."""
    made = Machines(num, folder, elsewhere)
    try:
        yield made
    finally:
        made.close()
