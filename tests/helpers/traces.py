"""Traces with given trajectories."""

import pyarrow as pa

from rhyme_verl.telemetry.trace import SCHEMA, write_trace


def write_trajectories(path, trajectories):
    """Write a trace file of trajectories (columns of its schema, except `length`) in a folder that may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**one, "length": len(one["tokens"])} for one in trajectories]
    write_trace(path, pa.Table.from_pylist(rows, schema=SCHEMA))
