"""`rhyme doctor`: finds what is wrong with an installation or a job, and says what to do.

`installation` looks at this environment, `probe` at what hosts see of it in a process of their own, `job` at a job's
whole config. Each check returns findings; `command` prints them.
"""
