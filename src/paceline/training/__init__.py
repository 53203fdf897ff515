"""Training: the decoder, its data, the instruments that observe a step, and the strategies that distribute it.

Imports torch, so ranks import it and the command line does not. `attachment` observes scripts of users and imports
nothing of Paceline. Start with `decoder`, then `strategies.ddp`.
"""
