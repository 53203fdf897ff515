"""Callbacks of training frameworks that mark the steps of a measured script exactly (see `paceline.track`).

The frameworks are imported when a callback is used. Without a measurement the callbacks do nothing.
"""
