"""Request ids: every tag comes back, and no id of another client is taken for one that the core cannot use."""

from hypothesis import given
from hypothesis import strategies as st

from rhyme_verl.request_id import SEPARATOR, RequestTag, tag_of
from tests.fuzz.fuzzing import fuzzed

counts = st.integers(0, 10**9 - 1)
fields = st.one_of(
    st.text(max_size=5),
    st.integers().map(str),
    st.integers(1, 6000).map(lambda num_digits: "7" * num_digits),
    st.text(st.characters(categories=["Nd", "Nl", "No"]), min_size=1, max_size=4),
)


@fuzzed(300)
@given(st.text().filter(lambda text: SEPARATOR not in text), st.text(), counts, counts)
def test_every_tag_comes_back(request_id, uid, sample, prompt_tokens):
    tag = RequestTag((uid, sample), prompt_tokens)
    assert tag_of(tag.append_to(request_id)) == tag


@fuzzed(600)
@given(st.text() | st.lists(fields, min_size=4, max_size=7).map(SEPARATOR.join))
def test_any_id_has_a_usable_tag_or_none(request_id):
    tag = tag_of(request_id)
    if tag is None:
        return
    assert tag_of(tag.append_to("again")) == tag
    assert 0 <= tag.answer_key < 2**64
    assert 0 <= tag.prompt_tokens < 2**31
