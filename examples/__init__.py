"""Runnable examples of rhyme_verl."""
