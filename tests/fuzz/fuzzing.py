"""How the fuzz tests run: always on the same inputs in `make test`, on new ones for ten minutes in `make fuzz`.

Both begin with the corpus, which `make fuzz` extends. It is Hypothesis's database: the inputs that failed, and those
that reached furthest (`hypothesis.target`). It knows a test by its source, so a changed test starts a new corpus.
"""

import os
from pathlib import Path

from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase, ReadOnlyDatabase

SEED = "RHYME_FUZZ_SEED"  # set by `make fuzz`
LONGER = 5
CORPUS = DirectoryBasedExampleDatabase(Path(__file__).parent / "corpus")

places = st.integers(-8192, 8192)  # from the start, or from the end
any_changes = st.lists(
    st.tuples(
        st.sampled_from(("flip", "insert", "overwrite", "copy", "remove", "truncate")),
        places,
        places,
        st.binary(min_size=1, max_size=16),
    ),
    min_size=1,
    max_size=4,
)


def fuzzed(num_inputs):
    """Decorate a property or a state machine: it gets `num_inputs` inputs, and LONGER times as many in `make fuzz`."""
    is_long = SEED in os.environ
    how = settings(
        max_examples=num_inputs * (LONGER if is_long else 1),
        database=CORPUS if is_long else ReadOnlyDatabase(CORPUS),
        derandomize=False,
        deadline=None,
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
        print_blob=True,
    )
    start = seed(int(os.environ.get(SEED, 0)))
    return lambda test: how(start(test))  # in this order, because a seed switches the database off


def damaged(data, changes):
    """Return bytes with `changes` (see `any_changes`) made one after the other."""
    for kind, at, other, extra in changes:
        at, other = at % (len(data) + 1), other % (len(data) + 1)
        head, tail, rest = data[:at], data[at:], data[at + len(extra) :]
        data = {
            "flip": head + bytes(byte ^ (1 << other % 8) for byte in tail[:1]) + tail[1:],
            "insert": head + extra + tail,
            "overwrite": head + extra + rest,
            "copy": head + data[other : other + len(extra)] + tail,
            "remove": head + rest,
            "truncate": head,
        }[kind]
    return data
