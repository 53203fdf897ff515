"""A replica of our own: a model of transformers behind an HTTP server as OpenAI's, for the engines that start one.

`python -m paceline.serving.replica front` answers HTTP and turns text into tokens; it starts one model process per device of
the replica (`python -m paceline.serving.replica model`), which computes and nothing else: formatting answers in the same
interpreter would hold up the next step. All of them end with the process that started them.
"""
