"""Child processes forked from pytest, with everything it has imported, in place of new interpreters."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import NoReturn


def started(main: Callable[[list[str]], int], words: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    """A forked child that calls `main(words)`, with its output in pipes."""

    def become() -> NoReturn:
        # Popen waits until the child has no file open but the standard ones, which it takes for an exec.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        code = 1
        try:
            sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
            os.environ.clear()
            os.environ.update(env)
            sys.argv = words
            code = main(words)
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    pipe = subprocess.PIPE
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, preexec_fn=become)
