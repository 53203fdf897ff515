"""In containers of the double: a node whose clock is wrong, where the test asks for one."""

import os
import time

_OFFSET_S = float(os.environ.get("CLOCK_OFFSET_S", "0"))
if _OFFSET_S:
    _true = time.time
    time.time = lambda: _true() + _OFFSET_S
