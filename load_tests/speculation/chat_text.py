"""Prompts of conversations with the built-in model."""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.hub.source import BUILTIN_FOLDER


@cache
def _template() -> ChatTemplate:
    return ChatTemplate.load(BUILTIN_FOLDER, None)


def prompt_of(turns: Sequence[str], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """The text up to the next answer.

    Args:
        turns: of the user and the assistant by turns; the user has the first and the last.
    """
    messages = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(turns)]
    return _template().render(messages, tools)
