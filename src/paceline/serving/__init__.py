"""Inference servers: the client that sends load, the engines that start servers, our own replica, and a mock.

`client` is the load generator (start with `client.plan` and `client.shard`), `engines` the plugins, `replica` a model
server of our own, `mock` a server with known latencies. May import `training`, `launchers` and below.
"""
