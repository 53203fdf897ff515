"""A program with the outside of `vllm serve`: its arguments, key, health and facts, and a process of its own beside it.

The variable STAND_IN says how it goes wrong: ends (with an error in the words of vLLM), silent (never ready), taken
(its first port is somebody else's). It leaves what it was given in the file that STAND_IN_TOLD names. Of a replica on
several nodes, every part but the first serves nothing, goes wrong alone, and has the number of its node in that file's
name.
"""

from __future__ import annotations

import http.server
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

FACTS = 'vllm:cache_config_info{block_size="16",enable_prefix_caching="False",kv_cache_size_tokens="4096"} 1.0\n'
ENDED = """(APIServer pid=7) WARNING 11-16 10:30:14 [system_utils.py:255] errors like `OSError: [Errno 24] Too many` may
(EngineCore pid=8) ERROR 11-16 10:30:15 [core.py:99] ValueError: no room for the cache; key {key}
(APIServer pid=7) RuntimeError: Engine core initialization failed. See root cause above.
"""


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        pages = {"/health": "", "/version": '{"version": "9.9"}', "/metrics": FACTS}
        known = self.path in pages
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(pages.get(self.path, "").encode())

    def log_message(self, format: str, *args: object) -> None: ...


def main(argv: list[str]) -> None:
    # Its engine: deaf to a polite end, and not in the same session.
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    engine = subprocess.Popen([sys.executable, "-c", deaf], start_new_session=True)
    given = dict(itertools.pairwise(argv))
    node = given.get("--node-rank", "0")
    told = Path(os.environ["STAND_IN_TOLD"] + ("" if node == "0" else f".{node}"))
    again = told.exists()
    files = sorted(path.name for path in Path(argv[2]).iterdir())
    facts = {"argv": argv, "files": files, "env": dict(os.environ), "pids": [os.getpid(), engine.pid]}
    told.write_text(json.dumps(facts))
    fault = os.environ.get("STAND_IN") if ("--headless" in argv) == (given.get("--nnodes") is not None) else None
    if fault == "ends":
        sys.exit(ENDED.format(key=os.environ["VLLM_API_KEY"]))
    if fault == "taken" and not again:
        sys.exit("OSError: [Errno 98] Address already in use")
    if fault == "silent":
        sys.stdout.write("Loading weights\n")
        sys.stdout.flush()
        time.sleep(600)
    if "--headless" in argv:
        time.sleep(600)
    http.server.HTTPServer((given["--host"], int(given["--port"])), Answers).serve_forever()


if __name__ == "__main__":
    main(sys.argv)
