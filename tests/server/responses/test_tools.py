"""Tools of the responses API as functions for the model: namespaces made flat, other kinds skipped and told of."""

import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.tools import MAX_TOOLS
from troupellm.server.responses.tools import ChosenTools

GET = {"type": "function", "name": "get", "description": "Get it", "parameters": {"type": "object"}, "strict": False}
SEARCH = {"type": "function", "name": "search", "description": "Find it"}
READ = {"type": "function", "name": "read"}
DOCS = {"type": "namespace", "name": "mcp__docs", "description": "All books.", "tools": [SEARCH, READ]}
MAIL = {"type": "namespace", "name": "mcp__mail__", "description": "", "tools": [SEARCH]}
PATCH = {"type": "custom", "name": "apply_patch", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}


def names_of(chosen):
    return [tool["function"]["name"] for tool in chosen.fields.get("tools", [])]


def test_functions_of_namespaces_are_functions_of_the_model():
    chosen = ChosenTools.of([DOCS, GET, MAIL], None)
    assert names_of(chosen) == ["mcp__docs__search", "mcp__docs__read", "get", "mcp__mail__search"]
    assert chosen.namespaced == {
        "mcp__docs__search": ("mcp__docs", "search"),
        "mcp__docs__read": ("mcp__docs", "read"),
        "mcp__mail__search": ("mcp__mail__", "search"),
    }
    assert chosen.kept == [DOCS, GET, MAIL]
    assert chosen.skipped == []


def test_the_description_of_a_namespace_is_told_once_with_its_first_function():
    told = [tool["function"].get("description") for tool in ChosenTools.of([DOCS, GET, MAIL], None).fields["tools"]]
    assert told == ["Find it", "About mcp__docs: All books.", "Get it", "Find it"]
    other = [tool["function"] for tool in ChosenTools.of([DOCS | {"tools": [READ, SEARCH]}], None).fields["tools"]]
    assert [tool.get("description") for tool in other] == ["About mcp__docs: All books.", "Find it"]
    only = {"type": "allowed_tools", "tools": [{"type": "function", "name": "read"}]}
    (read,) = ChosenTools.of([DOCS, GET], only).fields["tools"]
    assert read["function"]["description"] == "About mcp__docs: All books."


def test_tools_of_other_kinds_are_skipped_by_name():
    docs = DOCS | {"tools": [PATCH, READ]}
    empty = {"type": "namespace", "name": "none", "tools": [PATCH]}
    chosen = ChosenTools.of([{"type": "web_search"}, docs, {"type": "mcp", "server_label": "x"}, empty, GET], None)
    assert names_of(chosen) == ["mcp__docs__read", "get"]
    assert chosen.skipped == ["web_search", "custom", "mcp", "custom"]
    assert chosen.kept == [docs | {"tools": [READ]}, GET]
    assert ChosenTools.of([PATCH], "auto").fields == {}


def test_errors_name_the_place_where_the_client_has_put_the_function():
    chosen = ChosenTools.of([{"type": "web_search"}, GET, DOCS], None)
    assert chosen.names == [
        ("tools[0].function", "tools[1]"),
        ("tools[0]", "tools[1]"),
        ("tools[1].function", "tools[2].tools[0]"),
        ("tools[1]", "tools[2].tools[0]"),
        ("tools[2].function", "tools[2].tools[1]"),
        ("tools[2]", "tools[2].tools[1]"),
    ]
    only = {"type": "allowed_tools", "tools": [{"type": "function", "name": "read"}]}
    assert ChosenTools.of([GET, DOCS], only).names == [
        ("tools[0].function", "tools[1].tools[1]"),
        ("tools[0]", "tools[1].tools[1]"),
    ]


def test_whether_tools_are_called_that_nobody_chose_is_left_to_the_server():
    chosen = ChosenTools.of([GET], None)
    assert (chosen.choice, "tool_choice" in chosen.fields) == ("auto", False)
    assert ChosenTools.of([GET], "auto").fields["tool_choice"] == "auto"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"name": "get"}, "get"),
        ({"name": "read"}, "mcp__docs__read"),
        ({"name": "read", "namespace": "mcp__docs"}, "mcp__docs__read"),
        ({"name": "search", "namespace": "mcp__mail__"}, "mcp__mail__search"),
    ],
)
def test_a_function_is_chosen_by_its_own_name(choice, name):
    choice = {"type": "function"} | choice
    chosen = ChosenTools.of([GET, DOCS, MAIL], choice)
    assert chosen.fields["tool_choice"] == {"type": "function", "function": {"name": name}}
    assert chosen.choice == choice


def test_a_plain_function_is_meant_before_one_in_a_namespace():
    chosen = ChosenTools.of([DOCS, READ], {"type": "function", "name": "read"})
    assert chosen.fields["tool_choice"]["function"]["name"] == "read"


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        ([], []),
        ([{"type": "web_search"}], []),
        ([{"type": "function", "name": "get"}], ["get"]),
        ([{"type": "namespace", "name": "mcp__docs"}], ["mcp__docs__search", "mcp__docs__read"]),
        ([{"type": "function", "name": "search", "namespace": "mcp__mail__"}], ["mcp__mail__search"]),
    ],
)
def test_only_allowed_tools_are_offered(allowed, names):
    chosen = ChosenTools.of([GET, DOCS, MAIL], {"type": "allowed_tools", "mode": "auto", "tools": allowed})
    assert names_of(chosen) == names
    assert {name for name in names if name != "get"} <= set(chosen.namespaced)
    assert chosen.namespaced["mcp__docs__search"] == ("mcp__docs", "search")  # it may have been called before
    assert chosen.kept == [GET, DOCS, MAIL]


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "namespace", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "", "tools": []}], "tools[0].name"),
        ([{"type": "namespace", "name": "x"}], "tools[0].tools"),
        ([{"type": "namespace", "name": "x", "tools": [5]}], "tools[0].tools"),
        ([{"type": "namespace", "name": "x", "tools": [{}]}], "tools[0].tools[0].type"),
        ([{"type": "namespace", "name": "x", "tools": [READ, {"type": "function"}]}], "tools[0].tools[1].name"),
        ([DOCS | {"description": 5}], "tools[0].description"),
        ([GET | {"description": 5}], "tools[0].description"),
        ([{"type": "namespace", "name": "x", "tools": [GET | {"strict": "no"}]}], "tools[0].tools[0].strict"),
        ([{"type": "namespace", "name": "x", "tools": [GET | {"parameters": []}]}], "tools[0].tools[0].parameters"),
        ([GET] * (MAX_TOOLS + 1), "tools"),
    ],
)
def test_functions_and_namespaces_that_are_none_are_refused_by_name(tools, param):
    with pytest.raises(InvalidRequest) as caught:
        ChosenTools.of(tools, None)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_functions_of_namespaces_that_do_not_fit_are_skipped_and_told_of():
    many = [READ | {"name": f"read_{number}"} for number in range(MAX_TOOLS + 10)]
    chosen = ChosenTools.of([{"type": "namespace", "name": "x", "tools": many}, GET], None)
    names = names_of(chosen)
    assert len(names) == MAX_TOOLS
    assert "get" in names
    assert chosen.skipped == ["namespace_function"] * 11
    chosen = ChosenTools.of([GET, DOCS | {"name": "x" * 121}], None)
    assert names_of(chosen) == ["get", "x" * 121 + "__read"]
    assert chosen.skipped == ["namespace_function"]


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ({"type": "function", "name": "search"}, "tool_choice.name"),
        ({"type": "function", "name": "search", "namespace": "mcp__books"}, "tool_choice.name"),
        ({"type": "function", "name": "get", "namespace": "mcp__docs"}, "tool_choice.name"),
        ({"type": "custom", "name": "apply_patch"}, "tool_choice"),
        ({"type": "allowed_tools", "tools": [{"type": "function", "name": "put"}]}, "tool_choice.tools[0].name"),
        (
            {"type": "allowed_tools", "tools": [{"type": "namespace", "name": "books"}]},
            "tool_choice.tools[0].name",
        ),
        ({"type": "allowed_tools", "tools": [{"type": "web_search"}] * (MAX_TOOLS + 1)}, "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}]}, "tool_choice.mode"),
    ],
)
def test_choices_of_what_is_not_there_are_refused_by_name(choice, param):
    with pytest.raises(InvalidRequest) as caught:
        ChosenTools.of([GET, DOCS, MAIL, PATCH], choice)
    assert caught.value.param == param
    assert param in str(caught.value)
