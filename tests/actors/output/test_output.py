import anyio
import pytest

from troupellm.actors.output.actor import Output
from troupellm.actors.output.core import OutputCore
from troupellm.actors.output.detokenizer import TextTables
from troupellm.actors.runtime.mailbox import Mailbox
from troupellm.models.tokenizer.tokenizer import Tokenizer
from troupellm.protocol.errors import EngineStopped, RequestFailed
from troupellm.protocol.messages.output import RowFailed, RowFinished, StepOutput
from troupellm.protocol.messages.scheduler import AbortRequest, StopStringMet
from troupellm.tests.support.checkpoints import text_models
from troupellm.tests.support.environment.hand_clock import HandClock
from troupellm.tests.support.scheduler.output_bench import (
    END,
    TABLES,
    TOKENIZER,
    USAGE,
    Slot,
    closed,
    ids,
    opened,
    step,
)


@pytest.fixture
def sent() -> list:
    return []


@pytest.fixture
def core(sent) -> OutputCore:
    return OutputCore(TABLES, sent.append, 0.0)


def test_deltas_of_a_plain_sequence(core, sent):
    slot = Slot()
    core.handle(opened(slot), 0.0)
    assert slot.prompt == (5, 6)
    token_ids = ids("the quick 日本 fox")
    for token_id in token_ids:
        core.handle(step({10: [token_id]}), 0.0)
    core.handle(step({}, finished=(RowFinished(10, "length"),), closed=(closed(),)), 0.0)
    assert slot.text() == "the quick 日本 fox"
    assert slot.tokens() == tuple(token_ids)
    assert slot.ends() == [("length", None)]
    assert slot.closed == (USAGE, 1.0, 2.0)
    assert sent == []


def test_sequences_of_a_request_are_told_apart(core):
    slot = Slot()
    core.handle(opened(slot, rows=(10, 11)), 0.0)
    core.handle(step({11: ids("fox"), 10: ids("dog")}), 0.0)
    assert (slot.text(0), slot.text(1)) == ("dog", "fox")


def test_an_end_token_is_counted_but_not_shown(core):
    slot = Slot()
    core.handle(opened(slot, skip_special_tokens=False), 0.0)
    core.handle(step({10: ids("dog")}), 0.0)
    core.handle(step({10: [END]}, finished=(RowFinished(10, "stop", hide_last=True),)), 0.0)
    assert slot.text() == "dog"
    assert slot.tokens() == (*ids("dog"), END)


def test_a_stop_token_is_shown_when_asked_for(core):
    slot = Slot()
    core.handle(opened(slot, include_stop_str_in_output=True), 0.0)
    (last,) = ids("!")
    end = RowFinished(10, "stop", stop_token_id=last, hide_last=True)
    core.handle(step({10: [*ids("dog"), last]}, finished=(end,)), 0.0)
    assert slot.text() == "dog!"
    assert slot.ends() == [("stop", last)]


def test_a_cut_character_is_shown_at_the_end_as_a_replacement(core):
    slot = Slot()
    core.handle(opened(slot), 0.0)
    party = ids("🎉")
    assert len(party) > 1 or TOKENIZER.token_bytes(party[0]).decode() == "🎉"
    half = TABLES.raw.index("🎉".encode()[:1])
    core.handle(step({10: [*ids("a"), half]}), 0.0)
    assert slot.text() == "a"
    core.handle(step({}, finished=(RowFinished(10, "length"),)), 0.0)
    assert slot.text() == "a\ufffd"


def test_a_character_cut_by_steps_of_several_tokens(core):
    slot = Slot()
    core.handle(opened(slot), 0.0)
    party = [TABLES.raw.index(bytes([byte])) for byte in "🎉".encode()]
    for token_ids in (ids("a"), [*ids("b"), *party[:2]], party[2:3], party[3:], ids("c"), [*party[:1], *party[1:]]):
        core.handle(step({10: token_ids}), 0.0)
    core.handle(step({}, finished=(RowFinished(10, "length"),)), 0.0)
    assert slot.text() == "ab🎉c🎉"


@pytest.mark.parametrize("tables_of", [text_models.byte_fallback, text_models.word_piece])
def test_the_text_of_other_tokenizers_is_what_they_decode(tmp_path, sent, tables_of):
    tokenizer = Tokenizer.load(tables_of(tmp_path))
    core = OutputCore(TextTables(tokenizer), sent.append, 0.0)
    slot = Slot()
    core.handle(opened(slot), 0.0)
    token_ids = tokenizer.encode("the foxes é!", add_special_tokens=False)
    for token_id in token_ids:
        core.handle(step({10: [token_id]}), 0.0)
    core.handle(step({}, finished=(RowFinished(10, "length"),)), 0.0)
    assert slot.text().lstrip() == tokenizer.decode(token_ids)


def test_a_stop_string_ends_the_sequence_once(core, sent):
    slot = Slot()
    core.handle(opened(slot, stop_strings=("fox j",)), 0.0)
    token_ids = ids("the fox jumps over")
    for token_id in token_ids:
        core.handle(step({10: [token_id]}), 0.0)
    assert slot.text() == "the "
    assert slot.ends() == [("stop", "fox j")]
    assert sent == [StopStringMet(10)]
    assert TOKENIZER.decode(slot.tokens()).startswith("the fox j")
    assert len(slot.tokens()) < len(token_ids)
    core.handle(step({}, finished=(RowFinished(10, "stop"),), closed=(closed(),)), 0.0)
    assert slot.ends() == [("stop", "fox j")]
    assert slot.closed is not None


def test_tokens_behind_a_stop_string_in_one_step_are_dropped(core):
    slot = Slot()
    core.handle(opened(slot, stop_strings=("\n",)), 0.0)
    core.handle(step({10: ids("a") + ids("\n") + ids("b")}), 0.0)
    assert slot.text() == "a"
    assert slot.tokens() == (*ids("a"), *ids("\n"))


def test_a_stop_string_in_the_last_token_counts_before_the_length(core, sent):
    slot = Slot()
    core.handle(opened(slot, stop_strings=("g",)), 0.0)
    core.handle(step({10: ids("dog")}, finished=(RowFinished(10, "length"),), closed=(closed(),)), 0.0)
    assert slot.text() == "do"
    assert slot.ends() == [("stop", "g")]
    assert sent == []


def test_text_held_for_a_stop_string_is_shown_at_the_end(core):
    slot = Slot()
    core.handle(opened(slot, stop_strings=("dogma",)), 0.0)
    core.handle(step({10: ids("a dog")}), 0.0)
    assert slot.text() == "a "
    core.handle(step({}, finished=(RowFinished(10, "length"),)), 0.0)
    assert slot.text() == "a dog"


def test_without_detokenize_there_are_tokens_only(core):
    slot = Slot()
    core.handle(opened(slot, detokenize=False), 0.0)
    core.handle(step({10: ids("dog")}, finished=(RowFinished(10, "length"),)), 0.0)
    assert slot.text() == ""
    assert slot.tokens() == tuple(ids("dog"))
    assert slot.ends() == [("length", None)]


def test_a_failed_sequence_fails_its_request_alone(core, sent):
    slot, other = Slot(), Slot()
    core.handle(opened(slot, rows=(10, 11)), 0.0)
    core.handle(opened(other, request=2, rows=(12,)), 0.0)
    failure = RowFailed(10, "the logits of this request are not numbers", "engine_request_failed")
    core.handle(step({11: ids("a"), 12: ids("a")}, failed=(failure,)), 0.0)
    assert isinstance(slot.error, RequestFailed)
    assert slot.error.message == failure.message
    assert sent == [AbortRequest(1)]
    core.handle(step({11: ids("b"), 12: ids("b")}, closed=(closed(error=slot.error),)), 0.0)
    list(core.flush(0.0))
    assert slot.closed is None
    assert other.text() == "ab"


def test_a_failure_that_is_closed_in_the_same_step_needs_no_abort(core, sent):
    slot = Slot()
    core.handle(opened(slot), 0.0)
    core.handle(step({}, failed=(RowFailed(10, "no", "x"),), closed=(closed(error=RequestFailed("no")),)), 0.0)
    assert slot.error.message == "no"
    assert sent == []


def test_a_request_that_ends_with_an_error(core):
    slot = Slot()
    core.handle(opened(slot), 0.0)
    error = EngineStopped("the engine was closed")
    core.handle(step({}, closed=(closed(error=error), closed(request=99))), 0.0)
    assert slot.error is error


def test_unknown_rows_are_ignored(core, sent):
    core.handle(step({77: ids("a")}, finished=(RowFinished(78, "stop"),), failed=(RowFailed(79, "", ""),)), 0.0)
    assert sent == []


def test_readers_are_woken_by_time_but_at_once_for_firsts_and_ends(sent):
    core = OutputCore(TABLES, sent.append, 0.02)
    slot = Slot()
    core.handle(opened(slot), 0.0)
    slot.wakes = 0
    core.handle(step({10: ids("a")}), 1.0)
    assert slot.wakes == 1
    for tick in range(1, 20):
        now = 1.0 + tick * 0.001
        core.handle(step({10: ids("a")}), now)
        list(core.flush(now))
    assert slot.wakes == 1
    assert core.next_flush == pytest.approx(1.02)
    list(core.flush(1.0201))
    assert slot.wakes == 2
    assert core.next_flush is None
    core.handle(step({10: ids("a")}, finished=(RowFinished(10, "length"),)), 1.021)
    assert slot.wakes == 3


def pause_of(core, rows, now):
    """Seconds between two wakes, with a token for each of `rows` at `now` and one more soon after."""
    core.handle(step({row: ids("a") for row in rows}), now)
    list(core.flush(now + 0.11))
    core.handle(step({rows[0]: ids("a")}), now + 0.11)
    list(core.flush(now + 0.11))
    core.handle(step({rows[0]: ids("a")}), now + 0.1101)
    return core.next_flush - (now + 0.11)


def test_few_readers_are_woken_more_often(sent):
    """Two at 100 wakes a second have 20 ms each, one has 10; many have the interval."""
    core, slots = OutputCore(TABLES, sent.append, 0.05, wakes_per_second=100.0), [Slot() for _ in range(9)]
    core.handle(opened(slots[0]), 0.0)
    core.handle(step({10: ids("a")}), 0.0)
    core.handle(step({10: ids("a")}), 0.001)
    assert core.next_flush == pytest.approx(0.010)
    list(core.flush(0.0101))
    core.handle(opened(slots[1], 2, (11,)), 0.011)
    core.handle(step({11: ids("a")}), 0.1)
    core.handle(step({11: ids("a")}), 0.101)
    assert core.next_flush == pytest.approx(0.120)
    list(core.flush(0.1201))
    for number, slot in enumerate(slots[2:], start=3):
        core.handle(opened(slot, number, (10 + number,)), 0.2)
    core.handle(step({10 + number: ids("a") for number in range(3, 10)}), 0.25)
    list(core.flush(0.25))
    core.handle(step({11: ids("a")}), 0.3)
    list(core.flush(0.3))
    core.handle(step({11: ids("a")}), 0.301)
    assert core.next_flush == pytest.approx(0.350)


def test_many_readers_are_woken_less_often(sent):
    """Three at 100 wakes a second at most have 30 ms each, two the interval, thousands a tenth of a second."""
    core = OutputCore(TABLES, sent.append, 0.02, most_wakes_per_second=100.0)
    for number in range(3):
        core.handle(opened(Slot(), number, (10 + number,)), 0.0)
    assert pause_of(core, range(10, 13), 0.1) == pytest.approx(0.030)
    core.handle(step({}, closed=(closed(2),)), 0.3)
    assert pause_of(core, (10, 11), 0.4) == pytest.approx(0.020)
    for number in range(100, 160):
        core.handle(opened(Slot(), number, (number,)), 0.5)
    assert pause_of(core, range(100, 160), 0.6) == pytest.approx(0.100)


def test_readers_that_take_no_pieces_do_not_lengthen_the_pause_of_others(sent):
    """Those that wait for their turn, and whose answers come in one piece."""
    core = OutputCore(TABLES, sent.append, 0.02, most_wakes_per_second=100.0)
    core.handle(opened(Slot(), 1, (10,)), 0.0)
    for number in range(100, 150):
        core.handle(opened(Slot(streams=number % 2 == 0), number, (number,)), 0.0)
    core.handle(step({number: ids("a") for number in range(101, 150, 2)}), 0.05)
    assert pause_of(core, (10,), 0.1) == pytest.approx(0.020)


def test_answers_in_one_piece_become_text_once_per_interval_beside_a_reader_who_is_woken_at_once(sent):
    core, whole = OutputCore(TABLES, sent.append, 0.02, wakes_per_second=1000.0), Slot(streams=False)
    core.handle(opened(Slot(), 1, (10,)), 0.0)
    core.handle(opened(whole, 2, (11,)), 0.0)
    core.handle(step({10: ids("a"), 11: ids("a")}), 0.1)
    for tick in range(1, 19):
        core.handle(step({10: ids("a"), 11: ids("a")}), 0.1 + tick * 0.001)
        list(core.flush(0.1001 + tick * 0.001))
    assert len(whole.deltas) == 1
    core.handle(step({11: ids("a")}), 0.119)
    list(core.flush(0.1201))
    assert [len(delta.token_ids) for delta in whole.deltas] == [1, 19]


def test_a_share_for_few_is_not_less_than_the_bound_for_many(sent):
    core = OutputCore(TABLES, sent.append, 0.02, wakes_per_second=1000.0, most_wakes_per_second=100.0)
    core.handle(opened(Slot(), 1, (10,)), 0.0)
    assert pause_of(core, (10,), 0.1) == pytest.approx(0.001)


def test_readers_are_woken_more_often_when_others_have_left(sent):
    core, slots = OutputCore(TABLES, sent.append, 0.05, wakes_per_second=100.0), [Slot(), Slot()]
    for number, slot in enumerate(slots, start=1):
        core.handle(opened(slot, number, (9 + number,)), 0.0)
    core.handle(step({}, closed=(closed(2),)), 0.0)
    core.handle(step({10: ids("a")}), 0.1)
    core.handle(step({10: ids("a")}), 0.101)
    assert core.next_flush == pytest.approx(0.110)


def test_tokens_become_text_when_the_reader_is_woken(sent):
    """In between they are kept, whole characters or not, and an end brings what was kept of all sequences."""
    core, slot = OutputCore(TABLES, sent.append, 0.02), Slot()
    core.handle(opened(slot, rows=(10, 11)), 0.0)
    core.handle(step({10: ids("a"), 11: ids("x")}), 0.0)
    cut = [next(i for i, raw in enumerate(TABLES.raw) if raw == bytes([byte])) for byte in "é".encode()]
    for token in (cut[0], cut[1], *ids("b")):
        core.handle(step({10: [token], 11: ids("y")}), 0.001)
    assert (slot.text(0), slot.text(1), len(slot.deltas)) == ("a", "x", 2)
    list(core.flush(0.02))
    assert (slot.text(0), slot.text(1), len(slot.deltas)) == ("aéb", "xyyy", 4)
    core.handle(step({10: [cut[0]], 11: ids("y")}), 0.021)
    list(core.flush(0.021))
    assert len(slot.deltas) == 4
    core.handle(step({10: [END]}, finished=(RowFinished(10, "stop", None, True),)), 0.022)
    assert slot.tokens(0) == (*ids("a"), *cut, *ids("b"), cut[0], END)
    assert slot.text(0) == "aéb\ufffd"
    assert slot.text(1) == "xyyyy"


def test_an_error_comes_after_what_was_kept(sent):
    core, slot = OutputCore(TABLES, sent.append, 0.02), Slot()
    core.handle(opened(slot), 0.0)
    core.handle(step({10: ids("a")}), 0.0)
    core.handle(step({10: ids("b")}), 0.001)
    core.handle(StepOutput(step=3, closed=(closed(error=EngineStopped("over")),)), 0.002)
    assert slot.text() == "ab"
    assert isinstance(slot.error, EngineStopped)


def test_each_reader_has_its_own_time(sent):
    core = OutputCore(TABLES, sent.append, 0.02)
    early, late = Slot(), Slot()
    core.handle(opened(early), 0.0)
    core.handle(opened(late, request=2, rows=(20,)), 0.0)
    core.handle(step({10: ids("a")}), 1.0)
    core.handle(step({20: ids("a")}), 1.015)
    core.handle(step({10: ids("b"), 20: ids("b")}), 1.016)
    early.wakes = late.wakes = 0
    list(core.flush(1.021))
    assert (early.wakes, late.wakes) == (1, 0)
    assert core.next_flush == pytest.approx(1.035)


@pytest.mark.anyio
async def test_the_actor_hands_on_and_flushes_when_steps_stop_coming(sent):
    inbox: Mailbox = Mailbox("output", 8)
    clock = HandClock()
    actor = Output(inbox, TABLES, sent.append, clock, flush_interval=0.01)
    slot, second = Slot(), anyio.Event()
    async with anyio.create_task_group() as group:
        await group.start(actor.run)
        await inbox.put(opened(slot))
        await inbox.put(step({10: ids("a")}))
        await inbox.put(step({10: ids("b")}))
        slot.on_wake = lambda: second.set() if slot.text() == "ab" else None
        with anyio.fail_after(5):
            await anyio.wait_all_tasks_blocked()
            clock.time = 1.0
            await second.wait()
        await inbox.put(step({}, finished=(RowFinished(10, "length"),), closed=(closed(),)))
        inbox.close()
    assert slot.closed is not None


@pytest.mark.anyio
async def test_messages_queued_at_the_close_are_still_delivered(sent):
    inbox: Mailbox = Mailbox("output", 8)
    actor = Output(inbox, TABLES, sent.append, HandClock(), flush_interval=10.0)
    slot = Slot()
    await inbox.put(opened(slot))
    await inbox.put(step({10: ids("a")}))
    await inbox.put(step({10: ids("b")}))
    inbox.close()
    with anyio.fail_after(5):
        await actor.run()
    assert slot.text() == "ab"
    assert slot.wakes == 3
