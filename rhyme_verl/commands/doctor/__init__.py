"""`rhyme doctor`: finds faults of an installation or a job, and says how to fix them.

`installation` checks this environment, `probe` checks in a separate process what verl and vLLM know of rhyme_verl, and
`job` checks a job's whole config. Each check returns findings; `command` prints them.
"""
