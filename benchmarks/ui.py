"""The live view of `paceline ui` under load: synthetic agents on many nodes, a real server and a real browser.

    python benchmarks/ui.py                          512 nodes x 8 GPUs, one update per second, 20 s
    python benchmarks/ui.py --nodes 8 --keep DIR     keep the agents running until Ctrl-C

Each agent writes the files of its ranks and sends them as log lines, as agents do that share no disk with the
controller (`launchers/node/log_transport.py`). A controller receives all of them into one run directory. `paceline ui`
reads it, and Chromium shows it. Printed: CPU of agents, controller and server per second, bytes per second to a
browser, and milliseconds of script per update. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import math
import multiprocessing
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from paceline.experiment.choices import Choice
from paceline.experiment.spec import Precision, RunSpec, Topology, Training, WarmUp
from paceline.host.gauges import THROTTLE_REASONS
from paceline.launchers.node.log_transport import Receiver, Sender
from paceline.results import campaign_file, store
from paceline.results.records import GaugeSample, StepSample

STEP_S = 0.8
ROUNDS_BEFORE = 3
GIB = 2**30
# A disk in memory: the disk of this machine is not what is measured.
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
REASONS = tuple(THROTTLE_REASONS.values())
PHASES = ("forward", "backward", "optimizer")


def make_spec(nodes: int, gpus: int) -> RunSpec:
    """A training run over all nodes, long enough not to end."""
    return RunSpec(
        experiment="synthetic",
        workload=Choice("pretrain"),
        strategy=Choice("ddp"),
        launcher=Choice("ssh"),
        model=Choice("llama-8b"),
        topology=Topology(device="cuda", nodes=nodes, processes_per_node=gpus),
        training=Training(
            sequence_length=4096,
            micro_batch=1,
            accumulation=1,
            precision=Precision(compute="bf16", reduce="fp32"),
        ),
        steps=100_000,
        warmup=WarmUp(minimum=10, maximum=20, window=5),
    )


class Agent:
    """One node: its files on its own disk, and the lines that carry them."""

    def __init__(self, disk: Path, spec: RunSpec, node: int) -> None:
        self.disk, self.node, self.gpus = disk, node, spec.topology.processes_per_node
        disk.mkdir()
        self.first = node * self.gpus
        self.host = f"gpu-{node:03d}"
        self.marks = [store.ProgressFile(disk, self.first + i) for i in range(self.gpus)]
        self.gauges = (disk / f"samples-gauges-{self.first}.jsonl").open("w", buffering=1)
        self.steps = (disk / "samples-0.jsonl").open("w", buffering=1) if node == 0 else None
        facts = {"index": 0, "name": "NVIDIA H200", "memory_bytes": 141 * GIB, "power_limit_w": 700.0}
        facts |= {"sm_clock_max_hz": 1.98e9}
        machine = {"host": self.host, "gpus": [{**facts, "index": i} for i in range(self.gpus)]}
        (disk / f"machine-{self.host}.json").write_text(json.dumps(machine))
        self.random, self.step, self.traffic = random.Random(node), 0, 0
        self.sender = Sender(disk, node)

    def second(self, at: float, steps: int) -> None:
        """What the ranks of this node write in one second, after so many steps. One GPU of all is too hot, and its rank
        is late."""
        hot = self.node == 5
        for step in range(self.step, steps):
            if self.steps is not None:
                self.steps.write(store.sample_line(step_of(step, self.random)))
            self.step = step + 1
        for i, mark in enumerate(self.marks):
            mark.loss, mark.peak_bytes = 2 + 8 / math.sqrt(self.step + 1), 96.0 * GIB
            mark.mark(max(self.step - (1 if hot and i == 3 else 0), 0), "forward" if hot and i == 3 else "backward")
        self.traffic += int(4e8 * self.random.uniform(0.8, 1.2))
        host = GaugeSample(
            rank=self.first,
            host=self.host,
            at_s=at,
            cpu_ratio=self.random.uniform(0.1, 0.3),
            memory_used_bytes=int(self.random.uniform(180, 220) * GIB),
            received_bytes=self.traffic,
            sent_bytes=self.traffic,
        )
        devices = [self.gpu(at, i, hot and i == 3) for i in range(self.gpus)]
        self.gauges.write("".join(json.dumps({"kind": "gauge", **asdict(s)}) + "\n" for s in (host, *devices)))

    def gpu(self, at: float, index: int, hot: bool) -> GaugeSample:
        return GaugeSample(
            rank=self.first,
            host=self.host,
            at_s=at,
            device=index,
            utilisation_ratio=self.random.uniform(0.9, 1.0),
            memory_used_bytes=int(self.random.uniform(94, 97) * GIB),
            power_w=self.random.uniform(560, 700) if not hot else 380.0,
            temperature_c=self.random.uniform(52, 68) if not hot else 89.0,
            sm_clock_hz=self.random.uniform(1.7e9, 1.98e9) if not hot else 1.2e9,
            memory_clock_hz=3.2e9,
            throttle_reasons=(REASONS[4],) if hot else ((REASONS[1],) if self.random.random() < 0.05 else ()),
        )


def step_of(step: int, chance: random.Random) -> StepSample:
    nothing = dict.fromkeys(("data_wait_s", "h2d_s", "h2d_bytes", "forward_s", "backward_s", "optimizer_s"), None)
    return StepSample(
        rank=0,
        step=step,
        duration_s=STEP_S * chance.uniform(0.97, 1.03),
        tokens=8192,
        samples=8,
        micro_batches=1,
        updates=1,
        loss=2 + 8 / math.sqrt(step + 1) + chance.gauss(0, 0.02),
        grad_norm=None,
        data_digest=0,
        **nothing,
    )


def run_agents(disk: Path, run_dir: Path, spec: RunSpec, end: Any, spent: Any) -> None:
    """All agents, and the controller that receives their lines, once a second. spent: CPU seconds of both, rounds."""
    agents = [Agent(disk / str(node), spec, node) for node in range(spec.topology.nodes)]
    receiver, began, log = Receiver(run_dir), time.monotonic(), (run_dir / "log.txt").open("w", buffering=1)
    number = 0
    while not end.is_set():
        start = time.process_time()
        lines = []
        for agent in agents:
            agent.second(time.time(), int((time.monotonic() - began) / STEP_S))
            lines += agent.sender.changes()
        sent = time.process_time()
        for line in lines:
            receiver.feed(line)
        for rank in (0, 9, spec.topology.world_size - 1):
            log.write(f"[rank {rank}] step {agents[0].step} loss {2 + 8 / math.sqrt(agents[0].step + 1):.3f}\n")
        with spent.get_lock():
            spent[0] += sent - start
            spent[1] += time.process_time() - sent
            spent[2] += 1
        number += 1
        end.wait(max(0.0, began + number - time.monotonic()))


@contextlib.contextmanager
def cluster(out: Path, spec: RunSpec) -> Iterator[Any]:
    """Agents on their own disk, and the run directory of the controller; yields the CPU seconds spent."""
    context = multiprocessing.get_context("spawn")
    end, spent = context.Event(), context.Array("d", 3)
    run_dir = store.create(out, spec)
    campaign_file.write_plan(run_dir.parent, [spec])
    with tempfile.TemporaryDirectory(prefix="paceline-agents-", dir=MEMORY) as disk:
        process = context.Process(target=run_agents, args=(Path(disk), run_dir, spec, end, spent))
        process.start()
        try:
            yield spent
        finally:
            end.set()
            process.join(30)


def count_bytes(address: str, path: str, seconds: float) -> tuple[int, int]:
    """Bytes and updates that one browser gets."""
    connection = http.client.HTTPConnection(address, timeout=60)
    connection.request("GET", path)
    answer, began, size, ticks = connection.getresponse(), time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        line = answer.readline()
        size, ticks = size + len(line), ticks + (line == b"event: tick\n")
    connection.close()
    return size, ticks


def browse(url: str, seconds: float, shots: Path | None) -> dict[str, Any]:
    """Milliseconds of script per update, and the longest time between two frames, in Chromium."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome")
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,1000"):
        options.add_argument(argument)
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        browser.get(url)
        time.sleep(3)
        browser.execute_script(
            "livePaints.length = 0; window.frames_ = []; let last = performance.now();"
            "const go = now => { frames_.push(now - last); last = now; requestAnimationFrame(go); };"
            "requestAnimationFrame(go)"
        )
        # CPU time of the page's thread: other programs on this machine do not count.
        browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
        before = metrics_of(browser)
        time.sleep(seconds)
        after = metrics_of(browser)
        paints, frames = browser.execute_script("return [livePaints, frames_]")
        if shots is not None:
            browser.save_screenshot(str(shots))
        return {
            "updates": len(paints),
            "thread_cpu_ms_per_update": round(
                1000 * (after["TaskDuration"] - before["TaskDuration"]) / max(len(paints), 1), 1
            ),
            "heap_megabytes": round(after["JSHeapUsedSize"] / 1e6, 1),
            "script_ms_median": round(statistics.median(paints), 2),
            "script_ms_max": round(max(paints), 2),
            "frames_per_s": round(len(frames) / seconds, 1),
            "longest_frame_ms": round(max(frames), 1),
        }
    finally:
        browser.quit()


def metrics_of(browser: Any) -> dict[str, float]:
    found = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return {metric["name"]: metric["value"] for metric in found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=512)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--keep", type=Path, help="write into this directory and run until Ctrl-C")
    parser.add_argument("--screenshot", type=Path)
    parser.add_argument("--no-browser", action="store_true")
    arguments = parser.parse_args()
    import psutil

    spec = make_spec(arguments.nodes, arguments.gpus)
    with tempfile.TemporaryDirectory(prefix="paceline-ui-", dir=MEMORY) as own:
        out = arguments.keep or Path(own, "results")
        with cluster(out, spec) as spent:
            if arguments.keep:
                print(f"paceline ui {out}", flush=True)
                with contextlib.suppress(KeyboardInterrupt):
                    threading.Event().wait()
                return
            command = [sys.executable, "-m", "paceline.cli", "ui", str(out), "--listen", "127.0.0.1:0"]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdout is not None
                address = urlsplit(server.stdout.readline().strip()).netloc
                path = f"/campaign/{spec.experiment}/live"
                while spent[2] < ROUNDS_BEFORE:  # all nodes have sent something
                    time.sleep(0.2)
                count_bytes(address, f"{path}/events", 3.0)
                process, before = psutil.Process(server.pid), psutil.Process(server.pid).cpu_times()
                rounds, began = list(spent), time.monotonic()
                size, ticks = count_bytes(address, f"{path}/events", arguments.seconds)
                passed, after = time.monotonic() - began, process.cpu_times()
                agents, controller, done = (now - then for now, then in zip(list(spent), rounds, strict=True))
                result: dict[str, Any] = {
                    "nodes": arguments.nodes,
                    "gpus": arguments.nodes * arguments.gpus,
                    "agent_updates_per_s": round(done / passed, 2),
                    "server_updates_per_s": round(ticks / passed, 2),
                    "server_cpu_s_per_update": round(
                        (after.user + after.system - before.user - before.system) / max(ticks, 1), 3
                    ),
                    "controller_cpu_s_per_update": round(controller / max(done, 1), 3),
                    "agent_cpu_ms_per_update": round(1000 * agents / max(done, 1) / arguments.nodes, 3),
                    "kilobytes_per_update": round(size / 1000 / max(ticks, 1), 1),
                }
                if not arguments.no_browser:
                    url = f"http://{address}{path}"
                    result["browser"] = browse(url, arguments.seconds, arguments.screenshot)
                server.terminate()
    for name, value in result.items():
        print(f"{re.sub('_', ' ', name):<30} {value}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
