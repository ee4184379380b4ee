"""What a request id carries."""

from uuid import UUID

import pytest

from rhyme_verl.request_id import RequestTag, tag_of


@pytest.mark.parametrize("uid", ["0b1c", "a|b", "with space", "7"])
def test_a_tag_comes_back_from_a_request_id_whatever_the_uid_is(uid):
    tag = RequestTag((uid, 5), prompt_tokens=17)
    assert tag_of(tag.append_to("f00d")) == tag


@pytest.mark.parametrize("request_id", [7, UUID(int=7), "a|b|c"])
def test_an_agent_loop_may_choose_any_request_id(request_id):
    tag = RequestTag(("0b1c", 5), prompt_tokens=17)
    assert tag_of(tag.append_to(request_id)) == tag


@pytest.mark.parametrize("request_id", [None, "", "f00d", "f00d|1|2", "f00d|x|2|3|uid", "a|²|1|1|u", "cmpl-1|2|3"])
def test_other_request_ids_have_none(request_id):
    assert tag_of(request_id) is None


def test_answers_of_a_group_differ():
    keys = {RequestTag((uid, sample), 1).answer_key for uid in ("a", "b", "1 a") for sample in range(100)}
    assert len(keys) == 300
    assert RequestTag(("a", 1), 1).answer_key == RequestTag(("a", 1), 9).answer_key
