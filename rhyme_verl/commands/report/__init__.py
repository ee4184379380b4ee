"""`rhyme report`: what training runs recorded, as one HTML page that needs no network.

`run` reads a run's files, `figures` draws, `page` puts the page together, `command` is the command. Knows nothing of
verl, vLLM or Ray.
"""
