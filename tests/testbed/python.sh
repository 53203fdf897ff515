#!/bin/sh
# The interpreter that torchrun starts ranks with where it is a program of the nursery: they are such programs too.
exec "$NURSERY_PYTHON" -m testbed.nursery start "$@"
