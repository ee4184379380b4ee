"""Verifies drafts that are trees in one pass. A prototype for vLLM's CPU engine with synchronous scheduling."""
