"""Llama 3.1 to 3.3 (JSON), Llama 4 and others (Python's syntax)."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, OwnCall, Written

LLAMA_JSON: Final = CallSyntax(
    forms=("<|python_tag|>{json}",),
    bare="{json}",
    bare_lines=True,
    argument_keys=("parameters", "arguments"),
    written=Written(call="{json}", between="; "),
)


def _in_python(begin: str, end: str) -> OwnCall:
    return OwnCall(
        call="{name}({arguments})",
        argument="{key}={value}",
        between=", ",
        values="python",
        around=(f"{begin}[", ", ", f"]{end}"),
    )


PYTHONIC: Final = CallSyntax(
    forms=("<|python_start|>{python}<|python_end|>", "<|python_start|>{json}<|python_end|>"),
    bare="{python}",
    written=Written(
        call="<|python_start|>{json}<|python_end|>", own=(_in_python("<|python_start|>", "<|python_end|>"),)
    ),
)

LFM2: Final = CallSyntax(
    forms=("<|tool_call_start|>{python}<|tool_call_end|>", "<|tool_call_start|>{json}<|tool_call_end|>"),
    written=Written(
        call="<|tool_call_start|>{json}<|tool_call_end|>",
        own=(_in_python("<|tool_call_start|>", "<|tool_call_end|>"),),
    ),
)
