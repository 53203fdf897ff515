"""Plugins that tests run real campaigns with; on the path of every `paceline` that a test starts."""

import os

# `make test` tries each mechanism once, `make test-all` in every combination. A test that is only for the latter is
# marked `exhaustive`; a campaign that has more cells there asks for this.
EXHAUSTIVE = bool(os.environ.get("PACELINE_EXHAUSTIVE"))

# The cheapest run of real ranks that must meet over the network: one small sum, with no reference to compare it with.
ONE_SUM = "collectives:operations=all_reduce,dtypes=fp32,min_bytes=4KiB,max_bytes=4KiB,warmup=1,iters=6,budget_s=0.2"
ONE_SUM += ",tournament=false,overlap=false"
