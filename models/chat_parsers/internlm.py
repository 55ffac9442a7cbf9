"""InternLM 2 and 3."""

from typing import Final

from troupellm.models.chat_parsers.syntax import CallSyntax, Written

INTERNLM: Final = CallSyntax(
    forms=("<|action_start|> <|plugin|>\n{json}<|action_end|>",),
    argument_keys=("parameters", "arguments"),
    written=Written(call="<|action_start|><|plugin|>\n{json}<|action_end|>"),
)
