"""Training: the decoder, its data, the instruments that observe a step, and the strategies that distribute it.

Start with `decoder`, then `strategies`. Imports torch, so ranks import it and the command line does not.
"""
