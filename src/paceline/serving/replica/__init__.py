"""A replica of our own: a transformers model behind an OpenAI-compatible HTTP server, for the engines that start one.

`python -m paceline.serving.replica front` answers HTTP and tokenizes text. It starts one model process for each device
(`python -m paceline.serving.replica model`), which only computes: formatting answers in the same interpreter would
delay the next step. All of them end with the process that started them.
"""
