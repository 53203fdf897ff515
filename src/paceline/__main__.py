"""`python -m paceline`: the same as `paceline`, where no script is installed."""

import sys

from paceline.cli import main

sys.exit(main())
