"""Plugins that are wrong on purpose: each must be found out. Named `faulty.NAME` in a spec (PYTHONPATH=tests)."""
