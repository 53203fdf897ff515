"""Check the communication model on an emulated cluster: predicted against emulated steps of 2 to 16 nodes.

    sudo python benchmarks/emulated_cluster.py [--nodes 2,4,8,16] [--mbit 16] [--delay-ms 5] [--steps 5]

Each node is a network namespace whose link is shaped by tc; a message also waits for the delay of a hop. A step sleeps
for the compute time and then reduces real gradient bytes in a ring over TCP, as data parallelism does. The smallest
cluster is measured first and sets the bandwidth and the delay of one hop, as a fabric run would; the larger ones are
predicted from it and then emulated. Prints one JSON line per size. Needs root, iproute2 and tests/testbed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import socket
import statistics
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
PORT = 29_700
SUBNET = "10.83.7"
BURST_BYTES = 16_000


# --- one node ---


def rank_main(rank: int, nodes: int, size: int, compute_s: float, steps: int, delay_s: float) -> None:
    """Sleep and reduce `steps` times; rank 0 prints the seconds of each step."""
    before, after = _ring(rank, nodes)
    chunk = bytes(max(size // nodes, 1))
    times = []
    for _ in range(steps + 1):
        _exchange(before, after, b"x", 2 * (nodes - 1), 0.0)  # a barrier
        begun = time.perf_counter()
        time.sleep(compute_s)
        _exchange(before, after, chunk, 2 * (nodes - 1), delay_s)
        times.append(time.perf_counter() - begun)
    if rank == 0:
        sys.stdout.write(json.dumps(times[1:]) + "\n")


def _ring(rank: int, nodes: int) -> tuple[socket.socket, socket.socket]:
    """(connection from the rank before, connection to the rank after)."""
    listener = socket.create_server((f"{SUBNET}.{rank + 1}", PORT))
    deadline, after = time.monotonic() + 60, None
    while after is None:
        try:
            after = socket.create_connection((f"{SUBNET}.{(rank + 1) % nodes + 1}", PORT), timeout=30)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    before, _ = listener.accept()
    for one in (before, after):
        one.settimeout(120)
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return before, after


def _exchange(before: socket.socket, after: socket.socket, chunk: bytes, rounds: int, delay_s: float) -> None:
    """Send a chunk to the next rank and receive one from the previous, `rounds` times: a ring all-reduce's traffic."""
    message = struct.pack("!I", len(chunk)) + chunk
    for _ in range(rounds):
        time.sleep(delay_s)
        sender = threading.Thread(target=after.sendall, args=(message,))
        sender.start()
        left = 4 + len(chunk)
        while left:
            got = before.recv(min(left, 65_536))
            if not got:
                raise ConnectionError("the ring is broken")
            left -= len(got)
        sender.join()


# --- the cluster ---


def emulate(nodes: int, size: int, compute_s: float, mbit: float, delay_ms: float, steps: int) -> float:
    """Median seconds of a step on this many shaped nodes."""
    sys.path.insert(0, str(ROOT / "tests"))
    from testbed.networks import network

    with network(SUBNET, nodes) as cluster:
        for host in cluster.hosts:
            shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", str(BURST_BYTES), "latency", "2s")
            cluster.inside(host, "tc", "qdisc", "add", "dev", "eth0", *shape)
        command = [sys.executable, __file__, "--rank"]
        what = [str(nodes), str(size), str(compute_s), str(steps), str(delay_ms / 1000)]
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", host, *command, str(rank), *what], stdout=subprocess.PIPE, text=True
            )
            for rank, host in enumerate(cluster.hosts)
        ]
        try:
            output, _ = ranks[0].communicate(timeout=300)
        finally:
            for one in ranks:
                one.kill()
                one.wait()
    return statistics.median(json.loads(output))


def predicted(nodes: int, size: int, compute_s: float, rate: float, hop_s: float) -> float:
    """The step by the predictor's own communication model: one GPU per node, nothing hidden, links as measured."""
    from paceline.prediction import parameters
    from paceline.prediction.predict import setup_of
    from paceline.prediction.step_time import columns, parts

    one = setup_of("tiny", "h100", nodes, global_batch=nodes, shard="none", micro_batch=1)
    software = dataclasses.replace(one.software, reduce_bytes=size / one.parameters, bucket_bytes=1e12)
    one = one.replaced(software=software, gpus_per_node=1, link_bytes_per_s=rate, node_bytes_per_s=rate)
    shares = {"link": 0.0, "nic": 0.0, "alpha_node": math.log(hop_s), "dp_overlap": -40.0}
    values = {**parameters.load().values, **shares}
    return compute_s + float(parts(columns([one]), values)["data parallel (exposed)"][0])


def measured_link(size: int, compute_s: float, small_s: float, large_s: float, nodes: int) -> tuple[float, float]:
    """Bandwidth and seconds per hop from two message sizes on the smallest cluster."""
    wire = 2 * (nodes - 1) / nodes
    rate = wire * (size - size // 8) / (large_s - small_s)
    hop_s = max((large_s - compute_s - wire * size / rate) / (2 * nodes), 1e-6)
    return rate, hop_s


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", default="2,4,8,16")
    parser.add_argument("--mbit", type=float, default=16.0)
    parser.add_argument("--delay-ms", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--bytes", type=int, default=1_000_000)
    parser.add_argument("--compute-s", type=float, default=0.3)
    options = parser.parse_args()
    sizes = [int(text) for text in options.nodes.split(",")]
    shape = (options.compute_s, options.mbit, options.delay_ms, options.steps)
    large_s, small_s = (emulate(sizes[0], n, *shape) for n in (options.bytes, options.bytes // 8))
    rate, hop_s = measured_link(options.bytes, options.compute_s, small_s, large_s, sizes[0])
    report = {"link_bytes_per_s": rate, "hop_s": hop_s, "shaped_bytes_per_s": options.mbit * 1e6 / 8}
    sys.stdout.write(json.dumps(report) + "\n")
    for nodes in sizes[1:]:
        expected = predicted(nodes, options.bytes, options.compute_s, rate, hop_s)
        seen = emulate(nodes, options.bytes, *shape)
        line = {"nodes": nodes, "predicted_s": expected, "emulated_s": seen, "error": expected / seen - 1}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    if "--rank" in sys.argv:
        own = sys.argv[sys.argv.index("--rank") + 1 :]
        rank_main(int(own[0]), int(own[1]), int(own[2]), float(own[3]), int(own[4]), float(own[5]))
    else:
        sys.exit(main())
