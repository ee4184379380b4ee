"""Drafting in a vLLM server without verl; see README.md."""
