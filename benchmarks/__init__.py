"""Peers side by side in one run; each benchmark prints a table and writes `benchmarks/results/<name>.json`."""
