"""Past turns as public chat templates render them are read back as the same turns, by the parsers that auto chooses."""

import json
from pathlib import Path
from typing import Any

import pytest
from cut_texts import read_in_all_cuts
from recorded_dialects import TOOLS
from written_formats import FORMATS, Format

from troupellm.models.chat_parsers.catalog import AUTO, TOOL_PARSERS, chat_syntax_named, choose
from troupellm.models.chat_template.template import ChatTemplate
from troupellm.models.chat_template.template_process import TemplateProcesses

FOLDER = Path(__file__).parents[1] / "chat_templates"
KINDS = {"granite_3_3": "granite", "phi_4_mini": "phi3"}
SHAPES = sorted(path.stem for path in FOLDER.glob("*.jinja") if path.stem != "gemma_3")
MARKED = [entry for entry in FORMATS if not entry.lead.startswith("```")]
SEND: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "send",
        "description": "Sends a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}
ASK: list[dict[str, Any]] = [{"role": "user", "content": "How is it?"}]


@pytest.fixture(scope="module")
def processes():
    made = TemplateProcesses()
    yield made
    made.close()


@pytest.mark.parametrize("shape", SHAPES)
def test_a_rendered_call_is_read_back(shape: str, processes: TemplateProcesses):
    source = (FOLDER / f"{shape}.jinja").read_text("utf-8")
    template = ChatTemplate({"default": source}, {"bos_token": "<s>", "eos_token": "</s>"}, processes)
    names = choose(AUTO, AUTO, KINDS.get(shape, ""), source)
    assert names[0] != "none"
    call = {"id": "callabcd1", "type": "function", "function": {"name": "send", "arguments": {"text": "a 'b' <c>"}}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    before = template.render(ASK, tools=[SEND], add_generation_prompt=True)
    behind = [{"role": "tool", "tool_call_id": call["id"], "name": "send", "content": "done"}]
    whole = template.render([*ASK, turn, *behind], tools=[SEND], add_generation_prompt=False)
    shared = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
    text = whole[shared : whole.rindex("done")]
    chat_syntax = chat_syntax_named(*names)
    found = read_in_all_cuts(chat_syntax, text, TOOLS, start="answer" if chat_syntax.channels is None else "free")
    assert [(name, json.loads(arguments)) for name, arguments in found.calls][:1] == [("send", {"text": "a 'b' <c>"})]
    assert found.whole


@pytest.mark.parametrize("written", MARKED, ids=[f"{entry.parser}-{place}" for place, entry in enumerate(MARKED)])
def test_a_template_that_renders_such_calls_has_a_parser_that_reads_them(written: Format):
    """As auto chooses it: another name may stand for the same description."""
    thinks = "".join(written.thinks) if written.reasoning != "none" else ""
    calls = written.calls([("get_weather", {"city": "Paris"})])
    template = f"{thinks}{''.join(written.wraps)}{calls}"
    kinds = {"hunyuan_a13b": "hunyuan", "hy_v4": "hy_v4", "ling3": "bailing_moe", "minicpm5": "minicpm"}
    chosen, reasoning = choose(AUTO, AUTO, kinds.get(written.parser, ""), template)
    assert chosen in TOOL_PARSERS
    found = read_in_all_cuts(chat_syntax_named(chosen, reasoning, written.suffix), calls, TOOLS, start="free")
    if reasoning not in ("minimax_m2", "step3"):  # whose answers begin with thoughts
        assert [name for name, _ in found.calls] == ["get_weather"]
