"""Rules by which the parser "auto" is replaced with a named one.

The first rule that holds wins. A template's text counts more than the model type, which many families share.
"""

from collections.abc import Callable
from typing import Final

Rule = tuple[str, Callable[[str, str], bool]]
"""A parser's name, and a predicate over a model's type and the text of its chat templates."""


def _has(name: str, *marks: str) -> Rule:
    """All of these marks stand in the template."""
    return name, lambda kind, template: all(mark in template for mark in marks)


def _is(name: str, kinds: tuple[str, ...], *marks: str) -> Rule:
    """The model is of such a type, and its template has the marks."""
    return name, lambda kind, template: kind.startswith(kinds) and all(mark in template for mark in marks)


TOOL_RULES: Final[tuple[Rule, ...]] = (
    _has("inkling", "<|content_invoke_tool_json|>"),
    _has("muse", "<atem:function_calls>"),
    _has("kimi_k3", "<|open|>", "<|sep|>"),
    _has("openai", "<|channel|>", "<|message|>"),
    _has("mistral_v11", "[TOOL_CALLS]", "[ARGS]"),
    _has("mistral", "[TOOL_CALLS]"),
    _has("deepseek_v41", "｜DSML｜ calls>"),
    _has("deepseek_v4", "｜GCML｜"),
    _has("deepseek_v4", "｜DSML｜", "tool_calls>"),
    _has("deepseek_v32", "｜DSML｜", "function_calls>"),
    _has("deepseek_v3", "<｜tool▁calls▁begin｜>", "```json"),
    _has("deepseek_v31", "<｜tool▁calls▁begin｜>"),
    _has("kimi_k2", "<|tool_calls_section_begin|>"),
    _has("minimax_m3", "]<]minimax[>["),
    _has("minimax_m2", "<minimax:tool_call>"),
    _has("dots", "<dots_function_call>"),
    _has("step3", "<steptml:"),
    _has("seed_oss", "<seed:tool_call>"),
    _has("k2_horizon", "<ifm|tool_call>"),
    _has("solar_open2", "<|tool_arg:start|>"),
    _has("longcat", "<longcat_tool_call>"),
    _has("nemotron_json", "<TOOLCALL>"),
    _has("gigachat3", "<|function_call|>"),
    _has("gigachat3", "<|role_sep|>", "function call"),
    _has("apertus", "<|tools_prefix|>"),
    _has("plamo3", "<|plamo:begin_tool_request"),
    _has("functiongemma", "<start_function_call>"),
    _has("gemma4", "<|tool_call>"),
    _has("cohere_command4", "<|START_ACTION|>", "<|START_TEXT|>"),
    _has("cohere_command3", "<|START_ACTION|>"),
    _has("hy_v3", "<tool_sep"),
    _is("hy_v4", ("hy_v4", "hunyuan_v4"), "<arg_key"),
    _is("ling3", ("bailing", "ling"), "<arg_key>"),
    _has("glm45", "<arg_key>"),
    _is("mimo", ("mimo",), "<function=", "<parameter="),
    _is("nemotron_v3", ("nemotron",), "<function=", "<parameter="),
    _is("step3p5", ("step",), "<function=", "<parameter="),
    _has("qwen3_coder", "<function=", "<parameter="),
    _has("minicpm5", "<function name="),
    ("granite", lambda kind, template: kind.startswith("granite") and "<tool_call>" not in template),
    _is("phi4_mini_json", ("phi",), "<|tool"),
    _is("ernie45", ("ernie",), "<tool_call>"),
    _has("hermes", "<tool_call>"),
    ("llama4_pythonic", lambda kind, template: "<|python_start|>" in template or kind.startswith("llama4")),
    _has("lfm2", "<|tool_call_start|>"),
    _has("llama3_json", "<|python_tag|>"),
    _has("llama3_json", "ipython"),
    _has("internlm", "<|action_start|>"),
    ("glm4", lambda kind, template: kind in ("chatglm", "glm", "glm4") and "<|observation|>" in template),
    _is("hunyuan_a13b", ("hunyuan",), "<tool_calls>"),
    _has("jamba", "<tool_calls>"),
    _has("olmo3", "<function_calls>"),
)
REASONING_RULES: Final[tuple[Rule, ...]] = (
    _has("inkling", "<|content_thinking|>"),
    _has("muse", "to=self"),
    _has("kimi_k3", "<|open|>", "<|sep|>"),
    _has("openai_gptoss", "<|channel|>", "<|message|>"),
    ("mistral", lambda kind, template: "[THINK]" in template or ("[INST]" in template and "</think>" in template)),
    _has("granite", "Here is my thought process"),
    _has("minimax_m3", "<mm:think>"),
    _has("seed_oss", "<seed:think>"),
    _has("longcat", "<longcat_think>"),
    _has("k2_horizon", "<ifm|think"),
    _has("solar_open2", "<|think:start|>"),
    _has("apertus", "<|inner_prefix|>"),
    _has("plamo3", "<|plamo:begin_think"),
    _has("gemma4", "<|channel>thought"),
    _has("cohere_command4", "<|START_THINKING|>", "<|START_TEXT|>"),
    _has("cohere_command3", "<|START_THINKING|>"),
    _is("hy_v3", ("hy_v", "hunyuan_v"), "<think"),
    _has("gigachat3", "<|message_sep|>"),
    ("none", lambda kind, template: "think>" not in template),
    _is("granite", ("granite",)),
    _has("kimi_k2", "<|tool_calls_section_begin|>"),
    _has("minimax_m2", "<minimax:tool_call>"),
    _has("step3", "<steptml:"),
    _is("step3p5", ("step",)),
    _is("ernie45", ("ernie",)),
    _is("hunyuan_a13b", ("hunyuan",)),
    _is("ling3", ("bailing", "ling")),
    _has("deepseek_v4", "｜DSML｜"),
    _has("deepseek_v3", "<｜Assistant｜>", "thinking"),
    _has("deepseek_r1", "<｜Assistant｜>"),
    ("qwen3", lambda kind, template: True),
)
