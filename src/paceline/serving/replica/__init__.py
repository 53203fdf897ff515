"""A replica of our own: a model of transformers behind an HTTP server as OpenAI's, for the engines that start one.

`python -m paceline.serving.replica front` answers HTTP and tokenises text. It starts one model process for each device
(`python -m paceline.serving.replica model`), which only computes: formatting answers in the same interpreter would
delay the next step. All of them end with the process that started them.
"""
