"""Benchmarks: each runs all peers in one run, prints a table and writes `benchmarks/results/<name>.json`."""
