"""What the scripted model says to each client, step by step: the step is the number of tool results so far."""

import json
from collections.abc import Callable, Mapping
from typing import Any

SUMMARY_ASKED = ("detailed summary", "CONTEXT CHECKPOINT COMPACTION", "summary of the conversation", "anchored summary")
"""Words by which clients ask for a summary of the conversation."""
WRITTEN = "Hello from the script.\n"
NUM_READS = 24


def call(name: str, thought: str = "", text: str = "", **arguments: Any) -> str:
    """One call as the model writes it, perhaps with a thought and a text before it."""
    thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return f"{thinking}{text}{raw_call(json.dumps({'name': name, 'arguments': arguments}))}"


def raw_call(content: str) -> str:
    return f"<tool_call>\n{content}\n</tool_call>"


def claude_code(folder: str) -> list[str]:
    reads = [
        call("Read", f"Part {part} comes next.", file_path=f"{folder}/part{part}.txt") for part in range(NUM_READS)
    ]
    return [
        call("Write", "A file is wanted.", file_path=f"{folder}/hello.txt", content=WRITTEN),
        call("Read", "The picture helps.", "I look at the picture.", file_path=f"{folder}/dot.png"),
        raw_call('{"name": "Read", "arguments": {"file_path": '),
        call("Read", path=f"{folder}/hello.txt"),
        *reads,
    ]


def codex(folder: str) -> list[str]:
    reads = [call("exec_command", f"Part {part} comes next.", cmd=f"cat part{part}.txt") for part in range(NUM_READS)]
    return [
        call("exec_command", "A file is wanted.", cmd=f"printf 'Hello from the script.\\n' > {folder}/hello.txt"),
        call("view_image", "The picture helps.", "I look at the picture.", path=f"{folder}/dot.png"),
        raw_call('{"name": "exec_command", "arguments": {"cmd": '),
        call("exec_command", command=7),
        *reads,
    ]


def opencode(folder: str) -> list[str]:
    reads = [call("read", f"Part {part} comes next.", filePath=f"{folder}/part{part}.txt") for part in range(NUM_READS)]
    return [
        call("write", "A file is wanted.", filePath=f"{folder}/hello.txt", content=WRITTEN),
        call("read", "The picture helps.", "I look at the picture.", filePath=f"{folder}/dot.png"),
        raw_call('{"name": "read", "arguments": {"filePath": '),
        call("read", path=f"{folder}/hello.txt"),
        *reads,
    ]


SCRIPTS: Mapping[str, Callable[[str], list[str]]] = {"claude-code": claude_code, "codex": codex, "opencode": opencode}
