"""What the soak makes of its readings."""

import subprocess
import sys

from tests.soak.run import GROWTH_BYTES, MIB, Reading, Watch, _bars, _table, compare

MINUTES = 60.0
ACTOR, RAYLET = "ray::HistoryActor", "/site-packages/ray/core/src/ray/raylet/raylet --port=1"


def readings(per_minute, sockets=2):
    return [Reading(minute / 3, int(100 * MIB + per_minute * minute / 3), 5, sockets, 3) for minute in range(180)]


class Process(int):
    @property
    def pid(self):
        return int(self)


def compared(**commands):
    """Compare the readings of processes that do not exist: `name=(command, readings)`."""
    found = Watch()
    for number, (command, own) in enumerate(commands.values()):
        found.commands[Process(number)], found.readings[Process(number)] = command, own
    rows, ended = compare(found, MINUTES)
    _table(rows)
    return rows, _bars(rows, ended, [], 60, 400, MINUTES)


def test_growth_beyond_the_limit_is_found_in_our_processes_alone():
    fast = GROWTH_BYTES / 40
    rows, bars = compared(ours=(ACTOR, readings(fast / 2)), rays=(RAYLET, readings(10 * fast)))
    assert [row["judged"] for row in rows] == [True, False]
    assert all(one["holds"] for one in bars.values()), bars
    _, bars = compared(ours=(ACTOR, readings(fast)), rays=(RAYLET, readings(0)))
    assert [name for name, one in bars.items() if not one["holds"]] == [
        "growth of memory as a share of its limit, most of any process"
    ]


def test_more_sockets_and_lost_processes_are_found():
    more = [*readings(0)[:100], *readings(0, sockets=5)[100:]]
    _, bars = compared(sockets=(ACTOR, more), gone=(ACTOR, readings(0)[:60]))
    assert not bars["additional sockets, most of any process"]["holds"]
    assert not bars["processes that ended during the comparison"]["holds"]


def test_a_real_process_is_read():
    found = Watch()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found.read(0.0)
        process.communicate(b"\n")
    (reading,) = next(own for read, own in found.readings.items() if read.pid == process.pid)
    assert reading.memory > 0 and reading.files >= 3 and reading.threads >= 1
