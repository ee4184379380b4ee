"""A slow network cable: forwards Ethernet frames between two interfaces after a delay, and loses some of them.

It stands in for the kernel's netem, which not every machine has. `slow_cable.py carry FIRST SECOND SECONDS LOSS` runs
in the network namespace of both interfaces. On all machines, `slow_cable.py prepare INTERFACE` comes first: their
kernels then compute checksums and cut segments before they send, so that frames can be forwarded as they are.
"""

import array
import fcntl
import heapq
import itertools
import random
import select
import socket
import struct
import sys
import time

ETH_P_ALL = 3  # linux/if_ether.h
PACKET_OUTGOING = 4  # linux/if_packet.h
LONGEST_FRAME = 1 << 16
SIOCETHTOOL = 0x8946  # linux/sockios.h
# linux/ethtool.h: checksums, scatter and gather, TCP segments, other segments, merging of received ones
OFFLOADS = (0x17, 0x19, 0x1F, 0x24, 0x2C)


def prepare(interface):
    """Switch the interface's offloads off."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for offload in OFFLOADS:
            value = array.array("B", struct.pack("II", offload, 0))
            request = struct.pack("16sP", interface.encode(), value.buffer_info()[0])
            fcntl.ioctl(control, SIOCETHTOOL, request)


def carry(first, second, seconds, loss):
    """Forward frames in both directions until the process is killed."""
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) for _ in range(2)]
    for end, interface in zip(ends, (first, second), strict=True):
        end.bind((interface, ETH_P_ALL))
    others = dict(zip(ends, reversed(ends), strict=True))
    order, under_way = itertools.count(), []  # (when it arrives, number, the end at which it does, frame)
    print("carries", flush=True)
    while True:
        rest = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], rest)[0]:
            frame, (_, _, kind, *_) = end.recvfrom(LONGEST_FRAME)
            if kind != PACKET_OUTGOING and random.random() >= loss:
                heapq.heappush(under_way, (time.monotonic() + seconds, next(order), others[end], frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, end, frame = heapq.heappop(under_way)
            end.send(frame)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    if command == "prepare":
        prepare(*arguments)
    else:
        carry(arguments[0], arguments[1], float(arguments[2]), float(arguments[3]))
