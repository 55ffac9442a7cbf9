"""Training documents: pieces of text, each with a weight in the loss.

A chat document is rendered here exactly as the shipped chat template renders it, so that the model is
served the same text that it was trained on; the test suite compares the two.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START = "<tool_call>"
CALL_END = "</tool_call>"
# Given text counts a little too: a schema repeats its own names, which teaches copying early.
GIVEN = 0.1
DEFAULT_SYSTEM = "You are a helpful assistant."

TOOLS_BEFORE = (
    "\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text and how much each of its tokens counts in the loss."""

    text: str
    weight: float


@dataclass(frozen=True, slots=True)
class Exchange:
    """One question and its answer, as every chat generator returns it."""

    user: str
    assistant: str
    weight: float = 1.0


@dataclass(slots=True)
class Chat:
    """A conversation: turns in order, with an optional system text and optional tools."""

    turns: list[tuple[str, str, float]] = field(default_factory=list)
    system: str | None = None
    tools: Sequence[dict[str, Any]] = ()

    def ask(self, exchange: Exchange) -> None:
        """Append a question and its answer."""
        self.turns.append(("user", exchange.user, 0.0))
        self.turns.append(("assistant", exchange.assistant, exchange.weight))

    def pieces(self) -> list[Piece]:
        """Render the conversation; what the assistant says has most of the weight."""
        out: list[Piece] = []
        head = system_text(self.system, self.tools)
        if head is not None:
            out.append(Piece(f"{TURN_START}system\n{head}{TURN_END}\n", GIVEN))
        for role, content, weight in self.turns:
            if role == "tool":
                body = f"<tool_response>\n{content}\n</tool_response>"
                out.append(Piece(f"{TURN_START}user\n{body}{TURN_END}\n", GIVEN))
            elif role == "assistant":
                out.append(Piece(f"{TURN_START}assistant\n", 0.0))
                out.append(Piece(f"{content}{TURN_END}", weight))
                out.append(Piece("\n", 0.0))
            else:
                out.append(Piece(f"{TURN_START}{role}\n{content}{TURN_END}\n", GIVEN))
        return out


def system_text(system: str | None, tools: Sequence[dict[str, Any]]) -> str | None:
    """The text of the system turn: what was asked for, then the tools on offer."""
    if not tools:
        return system
    lines = "".join(f"\n{json.dumps(tool, ensure_ascii=False)}" for tool in tools)
    return f"{system or DEFAULT_SYSTEM}{TOOLS_BEFORE}{lines}{TOOLS_AFTER}"


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """One tool call in the form the template asks for."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_START}\n{body}\n{CALL_END}"
