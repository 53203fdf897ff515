#!/bin/sh
# The interpreter by which programs of the nursery, torchrun and the front of a replica, start others: such programs too.
exec "$NURSERY_PYTHON" -m testbed.nursery start "$@"
