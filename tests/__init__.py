"""Tests; a package, so that other distributions' `tests` do not shadow it."""
