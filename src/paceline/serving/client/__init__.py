"""The load generator: sends requests on a fixed schedule and records the kernel's receive time of every token.

Read in this order: `schedule` (what is due when, the assignment of one process and its results), `shard` (the event
loop of one process), `http_stream` (one connection and its answer), `replicas` (connections and queues of a shard),
`worker_pool` (all processes), `audit` (whether the client was accurate). `mlcommons` drives MLPerf LoadGen instead,
through `on_demand`.
"""
