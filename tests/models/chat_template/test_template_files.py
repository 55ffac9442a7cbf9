"""Which file of a folder gives the chat templates."""

import json

import pytest

from troupellm.models.chat_template.template import ChatTemplate
from troupellm.protocol.errors import InvalidRequest, ModelLoadError

USER = [{"role": "user", "content": "hi"}]
NAMED = [{"name": "default", "template": "of the list"}, {"name": "rag", "template": "for documents"}]


def write(folder, **templates):
    for name, text in templates.items():
        path = folder / {"config": "tokenizer_config.json", "old": "chat_template.json"}.get(name, f"{name}.jinja")
        if name in ("config", "old"):
            text = json.dumps({"chat_template": text})
        elif name != "chat_template":
            path = folder / "additional_chat_templates" / path.name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


def shown(folder, override=None, tools=None):
    return ChatTemplate.load(folder, override).render(USER, tools)


def test_files_replace_those_of_the_configuration_whole(tmp_path):
    write(tmp_path, config=[*NAMED, {"name": "tool_use", "template": "tools"}], chat_template="of the file")
    assert shown(tmp_path, tools=[{"type": "function"}]) == "of the file"
    with pytest.raises(ModelLoadError, match=r"'rag' is no file, no template text and no template of the model"):
        shown(tmp_path, "rag")


def test_additional_files_alone_replace_them_too(tmp_path):
    write(tmp_path, config="of the configuration", tool_use="of the folder")
    assert shown(tmp_path, tools=[{"type": "function"}]) == "of the folder"
    with pytest.raises(InvalidRequest, match="no default chat template, only tool_use; .* --chat-template NAME"):
        shown(tmp_path)


def test_chat_template_json_serves_where_there_is_nothing_else(tmp_path):
    write(tmp_path, old="of the old file")
    assert shown(tmp_path) == "of the old file"
    write(tmp_path, config="of the configuration")
    assert shown(tmp_path) == "of the configuration"


def test_an_override_names_one_of_the_templates(tmp_path):
    write(tmp_path, config=NAMED)
    assert shown(tmp_path) == "of the list"
    assert shown(tmp_path, "rag") == "for documents"
    with pytest.raises(ModelLoadError, match=r"it has: default, rag\)"):
        shown(tmp_path, "other")
