"""Callbacks of training frameworks that mark the steps of a measured script exactly (see `paceline.track`).

For the scripts of users: imports only `paceline.track`, and a framework when its callback is used. Without a
measurement the callbacks do nothing. Start with `huggingface` or `lightning`.
"""
