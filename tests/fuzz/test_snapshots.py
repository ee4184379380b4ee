"""The snapshot reader: any answers come back, and a damaged file is read or refused, within bounded memory."""

import resource
from contextlib import suppress

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, target
from hypothesis import strategies as st

from rhyme_verl.history import snapshot
from rhyme_verl.history.answers import UNKNOWN_REWARD, Answer
from rhyme_verl.history.snapshot import SnapshotError
from rhyme_verl.history.store import HistoryShard
from rhyme_verl.history.vocabulary import Vocabulary
from tests.fuzz.fuzzing import any_changes, damaged, fuzzed

VOCABULARY = Vocabulary(size=1000, fingerprint="0123456789abcdef")
MAX_READ_BYTES = 1 << 28  # for a file of a few kilobytes
HUGE_PAGE = ("insert", 489, 0, b"\xff\xc4\xe0\xf6")  # Arrow reserves 0.9 GB for it, but does not use them

uint64 = st.integers(0, 2**64 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
texts = st.lists(st.integers(0, VOCABULARY.size - 1), max_size=20).map(lambda text: np.array(text, np.int32).tobytes())
rewards = st.just(UNKNOWN_REWARD) | st.floats(width=32, allow_nan=False)
any_answers = st.lists(st.tuples(uint64, st.builds(Answer, uint64, int64, texts, rewards)), max_size=8)
values = st.binary(max_size=12) | st.sampled_from((b"1000", b"-1", b"9" * 5000))
any_metadata = st.fixed_dictionaries(
    {snapshot.FORMAT_KEY: st.sampled_from((snapshot.FORMAT_VERSION, b"9", b"\xff"))},
    optional={snapshot.SIZE_KEY: values, snapshot.FINGERPRINT_KEY: values},
)


def content(answers):
    return [(key, one.answer_id, one.step, one.tokens, str(one.reward)) for key, one in answers]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return snapshot.shard_file(tmp_path_factory.mktemp("snapshots"), 0, 1)


@pytest.fixture(scope="module")
def original(path):
    """The bytes of a snapshot with several row groups."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCABULARY.size, (40, 30)).astype(np.int32)
    answers = [(number // 4, Answer(number, number % 3, text.tobytes())) for number, text in enumerate(tokens)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "ROW_GROUP_TOKENS", 500)
        snapshot.save(path, answers, VOCABULARY)
    return path.read_bytes()


@fuzzed(60)
@given(any_answers)
def test_any_answers_come_back(path, answers):
    snapshot.save(path, answers, VOCABULARY)
    assert content(snapshot.load(path, VOCABULARY)) == content(answers)


def most_resident_bytes():
    """The most memory that this process has had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@fuzzed(600)
@given(any_changes)
@example([HUGE_PAGE, HUGE_PAGE])
def test_a_damaged_snapshot_is_read_or_refused(path, original, changes):
    path.write_bytes(damaged(original, changes))
    shard, peak = HistoryShard(3, 1 << 40), most_resident_bytes()
    try:
        for key, answer in snapshot.load(path):
            shard.add(key, answer)
    except SnapshotError as error:
        assert "\n" not in str(error)
    shard.check_integrity()
    assert most_resident_bytes() <= peak + MAX_READ_BYTES
    target(float(shard.counters().answers), label="answers read")


@fuzzed(150)
@given(any_metadata)
def test_any_metadata_is_read_or_refused(path, metadata):
    pq.write_table(snapshot.SCHEMA.with_metadata(metadata).empty_table(), path)
    with suppress(SnapshotError):
        assert list(snapshot.load(path)) == []
