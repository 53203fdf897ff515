"""What the client holds on this machine, against a server of known law in another process.

    python benchmarks/loadgen.py [--streams 5000] [--events 25000] [--seconds 20] [--shards 1]

Prints streams held, events/s, the error of TTFT against the law, schedule lag, read lag and processor time.
"""

from __future__ import annotations

import argparse

from paceline.selftest import one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=5000)
    parser.add_argument("--events", type=float, default=25_000, help="events per second of all streams")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--shards", type=int, default=1)
    asked = parser.parse_args()
    print(one(asked.events, asked.streams, asked.seconds, asked.shards).text)


if __name__ == "__main__":
    main()
