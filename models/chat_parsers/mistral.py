"""Mistral: a list of objects up to tokenizer version 7, names and arguments since version 11."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, Thinking, Written

_FORMS: Final = (
    "[TOOL_CALLS]{name}{?[CALL_ID]{call_id}?}{?[ARGS]?}{arguments}",
    "[TOOL_CALLS]{json}",
)

MISTRAL: Final = CallSyntax(
    forms=_FORMS, written=Written(before="[TOOL_CALLS] [", call="{json}", between=", ", after="]"), ids="alphanumeric"
)

MISTRAL_NEW: Final = CallSyntax(
    forms=_FORMS, written=Written(call="[TOOL_CALLS]{name}[ARGS]{arguments}"), ids="alphanumeric"
)

MISTRAL_THINK: Final = Thinking(opens=("[THINK]", "<think>"), closes=("[/THINK]", "</think>"), anywhere=True)
