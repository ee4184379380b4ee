"""`rhyme report`: builds one self-contained HTML page from the files of training runs.

`run` reads a run's files, `figures` draws them, `page` builds the page, and `command` defines the command. None of them
uses verl, vLLM or Ray.
"""
