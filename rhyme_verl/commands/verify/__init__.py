"""`rhyme verify`: checks on a user's own model that drafting does not change what is generated.

`engine` generates with and without drafts, `two_samples` compares sampled tokens, and `command` puts both together.
"""
