"""What the ring costs: features through it against a plain copy of the same bytes.

    python benchmarks/ring.py [--mib 32] [--slots 4] [--repeat 5]

One process: a batch's features written into a slot, as a target does, against `Tensor.copy_` into memory of its own.
Two processes: one writes slots, one copies them out, with the pipeline's own messages between them, against both copies
done one after the other in one process. On the CPU a drafter reads the slot where it lies and copies nothing.
"""
# ruff: noqa: E402

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

import torch
from parts import best

from trainer.channel import Peer, encode
from trainer.ring import Ring, RingLayout, create_ring

WIDTH, BATCH = 2048, 4


def lines(connection: socket.socket, buffer: bytearray) -> bytes:
    """The next message of the other end."""
    while b"\n" not in buffer:
        got = connection.recv(1 << 16)
        if not got:
            raise RuntimeError("the other process is gone")
        buffer += got
    line, _, rest = bytes(buffer).partition(b"\n")
    buffer[:] = rest
    return line


def consume(descriptor: int, layout: RingLayout, connection: socket.socket, rounds: int) -> None:
    """The far end: copies each slot out and gives it back."""
    torch.set_num_threads(1)
    ring, private = Ring(descriptor, layout, pin=False), None
    buffer = bytearray()
    for number in range(rounds):
        lines(connection, buffer)
        features = ring.slot(number % layout.slots, layout.length).features
        private = torch.empty_like(features) if private is None else private
        private.copy_(features)
        connection.sendall(encode({"k": "copied", "slot": number % layout.slots}))


def through(ring: Ring, source: torch.Tensor, connection: socket.socket, rounds: int) -> float:
    """Seconds until the far end has copied `rounds` slots out."""
    slots = ring.layout.slots
    peer, free, buffer = Peer(connection), slots, bytearray()
    connection.setblocking(True)
    began, done = time.perf_counter(), 0
    for number in range(rounds):
        while free == 0:
            lines(connection, buffer)
            free, done = free + 1, done + 1
        ring.slot(number % slots, ring.layout.length).features.copy_(source)
        free -= 1
        peer.send({"k": "filled", "slot": number % slots, "batch": number})
    while done < rounds:
        lines(connection, buffer)
        done += 1
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32, help="features of a slot")
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--dir", default="/dev/shm")
    given = parser.parse_args()
    torch.set_num_threads(1)
    length = (given.mib << 20) // (BATCH * WIDTH * 4)
    layout = RingLayout(given.slots, BATCH, length, WIDTH, "float32")
    descriptor = create_ring(layout, given.dir)
    ring = Ring(descriptor, layout, pin=False)
    source = torch.randn(BATCH, length, WIDTH)
    own = [torch.zeros_like(source) for _ in range(given.slots)]  # as much memory as the ring has: the same caches
    size = given.slots * source.numel() * 4

    def plain() -> None:
        for target in own:
            target.copy_(source)

    def into_slots() -> None:
        for number in range(given.slots):
            ring.slot(number, length).features.copy_(source)

    plain_s, ring_s = float("inf"), float("inf")
    for _ in range(3):  # in turns: another load on the machine hits both
        plain_s = min(plain_s, best(given.repeat, plain))
        ring_s = min(ring_s, best(given.repeat, into_slots))
    rounds, times = 4 * given.slots, []
    twice = [torch.zeros_like(source) for _ in range(2)]

    def both_copies() -> None:
        for _ in range(rounds):
            twice[0].copy_(source)
            twice[1].copy_(twice[0])

    memcpy_s = float("inf")
    for _ in range(given.repeat):
        memcpy_s = min(memcpy_s, best(1, both_copies))
        ours, theirs = socket.socketpair()
        child = os.fork()
        if child == 0:
            ours.close()
            code = 1
            try:
                consume(descriptor, layout, theirs, 2 * rounds)
                code = 0
            finally:
                if code:
                    traceback.print_exc()
                os._exit(code)
        theirs.close()
        through(ring, source, ours, rounds)  # the child's memory is touched for the first time here
        times.append(through(ring, source, ours, rounds))
        if os.waitpid(child, 0)[1] != 0:
            raise RuntimeError("the other process failed, see above")
        ours.close()
    os.close(descriptor)
    moved = rounds * source.numel() * 4
    print(f"slots of {given.mib} MiB, torch {torch.__version__}, {os.cpu_count()} cores, one thread each")
    print(f"one process    plain copy {size / plain_s / 1e9:6.2f} GB/s  into the ring {size / ring_s / 1e9:6.2f} GB/s")
    print(f"two processes  copied twice in one {moved / memcpy_s / 1e9:6.2f} GB/s  ", end="")
    print(f"through the ring {moved / min(times) / 1e9:6.2f} GB/s")
    print(f"ratio  writing a slot, of memcpy's rate: {plain_s / ring_s:.2f}")
    print(f"ratio  through the ring between processes, of two memcpy's rate: {memcpy_s / min(times):.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
