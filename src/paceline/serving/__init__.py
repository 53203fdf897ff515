"""Inference servers: the client that sends load, the engines that start servers, our own replica, and a mock server.

`client` is the load generator (start with `client.schedule` and `client.shard`), `engines` the plugins, `replica` a
model server of our own, `mock` a server with known latencies. May import `training`, `launchers` and below.
"""
