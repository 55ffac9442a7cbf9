"""The answers of the scripted model to each client, step by step: the step is the number of tool results so far."""

import json
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SUMMARY_ASKED = ("create a detailed summary", "CONTEXT CHECKPOINT COMPACTION")
"""Words by which clients that go on offering tools ask for a summary of the conversation."""
WRITTEN = "Hello from the script.\n"
NUM_STEPS = 30
NUM_ODD_STEPS = 4
"""Steps before files are read: one is written, a picture is seen, two calls are broken."""
NUM_LINES = 40
"""Of each file: some 800 tokens."""
_SCRIPT = re.compile(r"\[script ([\w-]+) ([^\s\]]+)\]")
_SO_FAR = re.compile(r"\[results so far: (\d+)\]")


def write_files(folder: Path) -> Path:
    """The files that the scripts read. Each tells how many results there are with it: a summary may lose them."""
    folder.mkdir(parents=True)
    (folder / "dot.png").write_bytes(_red_square(8))
    for part in range(NUM_STEPS - NUM_ODD_STEPS):
        lines = [f"Part {part}, line {line}: the words of this line are {line * part}.\n" for line in range(NUM_LINES)]
        mark = f"[results so far: {part + NUM_ODD_STEPS + 1}]\n"
        (folder / f"part{part}.txt").write_text("".join([mark, *lines]))
    return folder


def _red_square(side: int) -> bytes:
    """A picture in PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\xff\0\0" * side) * side)
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def question(name: str, folder: Path) -> str:
    """The question for the client; it names the script."""
    return f"[script {name} {folder}] Write the file and read the others."


def answer_of(prompt: str, *, user: str, tools: str, result: str) -> str:
    """The scripted answer to a rendered prompt.

    Args:
        user, tools, result: what a message of the user, the offer of tools and the result of a tool begin with.
    """
    asked = list(_SCRIPT.finditer(prompt))
    if not asked:
        return "Ready."
    name, folder = asked[-1].groups()
    marks = list(_SO_FAR.finditer(prompt))
    known, begin = max(((int(mark.group(1)), mark.end()) for mark in marks), default=(0, 0))
    step = known + prompt.count(result, begin)
    if tools not in prompt and not step:
        return "A short title"
    if tools not in prompt or any(words in prompt.rpartition(user)[2] for words in SUMMARY_ASKED):
        return f"Summary: some files were read. [script {name} {folder}] [results so far: {step}]"
    steps = SCRIPTS[name](folder)
    return steps[step] if step < len(steps) else "All done."


def call(name: str, thought: str = "", text: str = "", **arguments: Any) -> str:
    """One call as the model writes it, perhaps with a thought and a text before it."""
    thinking = f"<think>\n{thought}\n</think>\n\n" if thought else ""
    return f"{thinking}{text}{raw_call(json.dumps({'name': name, 'arguments': arguments}))}"


def raw_call(content: str) -> str:
    return f"<tool_call>\n{content}\n</tool_call>"


def file_tools(write: str, read: str, path: str, **extra: str) -> Callable[[str], list[str]]:
    """The script of a client that has a tool to write a file and one to read it, pictures too.

    Args:
        path: the argument that names the file.
        extra: more arguments of reading.
    """

    def script(folder: str) -> list[str]:
        written: dict[str, str] = {path: f"{folder}/hello.txt", "content": WRITTEN}
        parts = range(NUM_STEPS - NUM_ODD_STEPS)
        return [
            call(write, "A file is wanted.", **written),
            call(read, "The picture helps.", "I look at the picture.", **{path: f"{folder}/dot.png"}, **extra),
            raw_call(f'{{"name": "{read}", "arguments": {{"{path}": '),
            call(read, wrong=f"{folder}/hello.txt"),
            *[call(read, f"Part {part} comes.", **{path: f"{folder}/part{part}.txt"}, **extra) for part in parts],
        ]

    return script


def codex(folder: str) -> list[str]:
    shell = "exec_command"
    return [
        call(shell, "A file is wanted.", cmd=f"printf 'Hello from the script.\\n' > {folder}/hello.txt"),
        call("view_image", "The picture helps.", "I look at the picture.", path=f"{folder}/dot.png"),
        raw_call(f'{{"name": "{shell}", "arguments": {{"cmd": '),
        call(shell, command=7),
        *[call(shell, f"Part {part} comes.", cmd=f"cat part{part}.txt") for part in range(NUM_STEPS - NUM_ODD_STEPS)],
    ]


def cline(folder: str) -> list[str]:
    def read(name: str) -> dict[str, Any]:
        return {"files": [{"path": f"{folder}/{name}"}]}

    parts = range(NUM_STEPS - NUM_ODD_STEPS)
    return [
        call("editor", "A file is wanted.", path=f"{folder}/hello.txt", new_text=WRITTEN),
        call("read_files", "The picture helps.", "I look at the picture.", **read("dot.png")),
        raw_call('{"name": "read_files", "arguments": {"files": [{"path": '),
        call("read_files", wrong=f"{folder}/hello.txt"),
        *[call("read_files", f"Part {part} comes.", **read(f"part{part}.txt")) for part in parts],
    ]


SCRIPTS: Mapping[str, Callable[[str], list[str]]] = {
    "claude-code": file_tools("Write", "Read", "file_path"),
    "codex": codex,
    "opencode": file_tools("write", "read", "filePath"),
    "qwen-code": file_tools("write_file", "read_file", "file_path"),
    "pi": file_tools("write", "read", "path"),
    "cline": cline,
    "cn": file_tools("Write", "Read", "filepath"),
    "llm": file_tools("write", "read", "path"),
    "vibe": file_tools("write_file", "read_file", "path"),
    "kimi": file_tools("Write", "Read", "path"),
}
