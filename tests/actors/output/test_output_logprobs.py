from array import array

import msgspec
import pytest

from troupellm.actors.output.core import OutputCore
from troupellm.actors.output.logprobs import token_logprobs
from troupellm.protocol.messages.output import StepOutput
from troupellm.tests.support.scheduler.output_bench import END, TABLES, Slot, ids, opened, row_logprobs, step


@pytest.fixture
def core() -> OutputCore:
    return OutputCore(TABLES, [].append, 0.0)


def test_log_probabilities_come_with_their_tokens(core):
    slot = Slot()
    core.handle(opened(slot, logprobs=2, stop_strings=("\n",)), 0.0)
    (letter,), (newline,) = ids("a"), ids("\n")
    half = TABLES.raw.index(b"\xf0")
    entry = row_logprobs(10, 2, [[letter, half, END], [newline, letter, 400], [letter, letter, letter]])
    core.handle(step({10: [letter, newline, letter]}, logprobs=(entry,)), 0.0)
    first, second = slot.deltas[0].logprobs  # the token behind the stop string is gone
    assert (first.token_id, first.logprob, first.rank, first.token, first.raw) == (letter, 0.0, 7, "a", b"a")
    assert [(t.token_id, t.logprob, t.rank, t.token, t.raw) for t in first.top] == [
        (half, -0.5, 1, "\ufffd", b"\xf0"),
        (END, -1.0, 2, "<|end|>", b"<|end|>"),
    ]
    assert second.token == "\n"
    assert second.top[1].token == ""  # a padded row of the logits


def test_prompt_log_probabilities_are_collected_over_chunks(core):
    slot = Slot()
    prompt = ids("abcde")
    core.handle(opened(slot, rows=(10, 11), prompt_logprobs=0, prompt_token_ids=array("i", prompt).tobytes()), 0.0)
    chunk = row_logprobs(10, 1, [[prompt[1]], [prompt[2]]])
    list(core.read_prompt(step({}, prompt_logprobs=(chunk,))))
    assert slot.prompt_entries is None
    again = row_logprobs(10, 1, [[i] for i in prompt[1:]])  # after a preemption the prompt is computed again
    other = row_logprobs(11, 1, [[0] for _ in prompt[1:]])
    list(core.read_prompt(step({}, prompt_logprobs=(other, again))))
    assert slot.prompt_entries[0] is None
    assert [entry.token_id for entry in slot.prompt_entries[1:]] == prompt[1:]


def test_prompt_log_probabilities_are_read_in_portions(core):
    slot, length, width = Slot(), 1000, 21
    prompt = array("i", [1] * length).tobytes()
    core.handle(opened(slot, prompt_token_ids=prompt, prompt_logprobs=20), 0.0)
    entry = row_logprobs(10, 1, [[5] * width] * (length - 1))
    message = StepOutput(step=1, prompt_logprobs=(entry,))
    pauses = sum(1 for _ in core.read_prompt(message))
    assert pauses == (length - 1) // (2048 // width)
    assert len(slot.prompt_entries) == length


def test_a_prompt_of_one_token_has_no_log_probability(core):
    slot = Slot()
    core.handle(opened(slot, prompt_logprobs=1, prompt_token_ids=array("i", [5]).tobytes()), 0.0)
    assert slot.prompt_entries == [None]


def test_each_token_has_the_ranks_of_its_own_alternatives():
    entry = row_logprobs(10, 2, [[5, 6, 7], [8, 9, 10]])
    listed = msgspec.structs.replace(entry, other_ranks=array("i", [31, 32, 41, 42]).tobytes())
    assert [[top.rank for top in each.top] for each in token_logprobs(listed, TABLES)] == [[31, 32], [41, 42]]
    assert [[top.rank for top in each.top] for each in token_logprobs(entry, TABLES)] == [[1, 2], [1, 2]]
