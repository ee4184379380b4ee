"""DAPO on DAPO-Math-17k; see README.md."""
