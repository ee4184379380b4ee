"""Replaying a recorded trace; see README.md."""
