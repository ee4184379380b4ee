"""rhyme_verl: rollouts that remember, for LLM reinforcement learning with verl and vLLM.

HistoSpec drafts a prompt's next tokens from the prompt's own earlier answers; the current model verifies them, so the
output distribution is exactly the model's own. Source: RhymeRL, "History Rhymes", arXiv 2508.18588.
"""

from rhyme_verl.version import __version__

__all__ = ["__version__"]
