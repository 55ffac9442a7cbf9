"""Llama 3.1 to 3.3 (JSON), Llama 4 and others (Python's syntax)."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, Written

LLAMA_JSON: Final = CallSyntax(
    forms=("<|python_tag|>{json}",),
    bare="{json}",
    bare_lines=True,
    argument_keys=("parameters", "arguments"),
    written=Written(call="{json}", between="; "),
)

# A grammar has no schema for Python's values; the parser reads JSON too where nothing else was written.
PYTHONIC: Final = CallSyntax(
    forms=("<|python_start|>{python}<|python_end|>", "<|python_start|>{json}<|python_end|>"),
    bare="{python}",
    written=Written(call="<|python_start|>{json}<|python_end|>"),
)

LFM2: Final = CallSyntax(
    forms=("<|tool_call_start|>{python}<|tool_call_end|>", "<|tool_call_start|>{json}<|tool_call_end|>"),
    written=Written(call="<|tool_call_start|>{json}<|tool_call_end|>"),
)
