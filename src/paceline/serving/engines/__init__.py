"""Engines: what serves the model of a load test, one plugin per module.

`openai` uses endpoints that already run; the others start servers on the devices of their ranks (`_server`). All offer
the OpenAI HTTP API, so that one client measures them. Start with `openai`.
"""
