"""No message of an earlier turn makes a conversation fail: with any chat template, in any place, this turn and the
next one have a prompt, and the next turn's begins with this one's."""

import pytest

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.tests.support.chat.template_kinds import KINDS
from troupellm.tests.support.chat.transcripts import ALL_KINDS, answer, prompt_of, random_transcript, user

TEMPLATES = {name: ChatTemplate({"default": source}, {}) for name, source in KINDS.items()}
CASES = [(api, kind) for api, kinds in ALL_KINDS.items() for kind in kinds]
ENDINGS = [(api, kind) for api, kind in CASES if api != "messages" or ALL_KINDS[api][kind][-1]["role"] != "assistant"]
"""An answer at the end of Anthropic's messages asks to go on from its text."""
QUICK, ALL = 400, 10_000


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("api", "kind"), CASES)
def test_this_turn_and_the_next_have_a_prompt_and_the_same_beginning(api: str, kind: str, name: str):
    given = ALL_KINDS[api][kind]
    for before in ([], [user()], [user(), answer()]):
        this = [*before, *given, user("What now?")]
        shown, _ = prompt_of(TEMPLATES[name], api, this)
        following, _ = prompt_of(TEMPLATES[name], api, [*this, answer("This."), user("And now?")])
        assert following.startswith(shown)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(("api", "kind"), ENDINGS)
def test_a_turn_that_ends_with_it_has_a_prompt(api: str, kind: str, name: str):
    this = [user("What is it?"), *ALL_KINDS[api][kind]]
    shown, _ = prompt_of(TEMPLATES[name], api, this)
    assert "What is it?" in shown
    following, _ = prompt_of(TEMPLATES[name], api, [*this, answer(), user("And now?")])
    assert "What is it?" in following
    assert "And now?" in following


@pytest.mark.parametrize("api", ALL_KINDS)
def test_random_transcripts_have_prompts(api: str):
    check_transcripts(api, range(QUICK))


@pytest.mark.slow
@pytest.mark.parametrize("api", ALL_KINDS)
def test_ten_thousand_random_transcripts_have_prompts(api: str):
    check_transcripts(api, range(QUICK, ALL))


def check_transcripts(api: str, seeds: range) -> None:
    templates = list(TEMPLATES.values())
    for seed in seeds:
        this = random_transcript(api, seed)
        template = templates[seed % len(templates)]
        shown, _ = prompt_of(template, api, this)
        later = random_transcript(api, seed + 1)
        following, _ = prompt_of(template, api, [*this, answer("This."), *later])
        # Tools that a later turn brings along stand before everything else.
        assert following.rpartition("</tools>")[2].startswith(shown.rpartition("</tools>")[2]), f"seed {seed}"
