"""Plugins that tests run real campaigns with; on the path of every `paceline` that a test starts."""

import os

# `make test` tries each mechanism once, `make test-all` in every combination. A test that is only for the latter is
# marked `exhaustive`; a campaign that has more cells there asks for this.
EXHAUSTIVE = bool(os.environ.get("PACELINE_EXHAUSTIVE"))
