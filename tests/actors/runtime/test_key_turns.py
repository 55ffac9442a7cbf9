"""A queue in which keys take turns, and the mailbox that has one."""

import anyio
import pytest

from troupellm.actors.runtime.mailbox import KeyTurns, Mailbox


def key_of(item: str) -> str:
    return item[0]


def drained(turns: KeyTurns[str]) -> list[str]:
    return [turns.popleft() for _ in range(len(turns))]


def test_keys_take_turns_and_each_keeps_its_order() -> None:
    turns = KeyTurns(key_of)
    for item in ("a1", "a2", "a3", "b1", "c1", "b2"):
        turns.append(item)
    assert sorted(turns) == ["a1", "a2", "a3", "b1", "b2", "c1"]
    assert drained(turns) == ["a1", "b1", "c1", "a2", "b2", "a3"]
    with pytest.raises(IndexError):
        turns.popleft()


def test_an_item_that_is_taken_out_leaves_the_others_in_order() -> None:
    turns = KeyTurns(key_of)
    for item in ("a1", "a2", "b1"):
        turns.append(item)
    turns.remove("b1")
    with pytest.raises(ValueError, match="not in deque"):
        turns.remove("b1")
    turns.remove("a1")
    assert drained(turns) == ["a2"]


@pytest.mark.anyio
async def test_a_key_waits_for_one_message_of_a_key_that_fills_the_mailbox() -> None:
    box: Mailbox[str, str] = Mailbox("intake", 4, turns_by=key_of)
    taken = []
    async with anyio.create_task_group() as group:
        for number in range(100):
            group.start_soon(box.put, f"a{number:02}")
        await anyio.wait_all_tasks_blocked()
        group.start_soon(box.put, "b")
        await anyio.wait_all_tasks_blocked()
        while (message := box.take()) is not None:
            taken.append(message)
    assert taken.index("b") <= 3
    assert [message for message in taken if message != "b"] == [f"a{number:02}" for number in range(100)]
