import pytest

from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.params.tools import MAX_SCHEMA_DEPTH, MAX_TOOLS, MAX_TOOLS_BYTES, by_name, check_tools, tool_use


def tool(name: str = "f", **function: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": name} | function}


def test_tools_have_the_form_that_templates_know():
    given = tool(strict=True, parameters={"type": "object"}, description="d", more=1) | {"defer_loading": True}
    (checked,) = check_tools([given])
    assert checked == {
        "type": "function",
        "function": {"name": "f", "description": "d", "parameters": {"type": "object"}},
    }
    assert list(checked["function"]) == ["name", "description", "parameters"]
    assert check_tools([tool()])[0]["function"]["parameters"] == {"type": "object", "properties": {}}


def test_a_tool_choice_says_which_tools_may_be_called():
    tools = [tool("f", strict=True), tool("g")]
    assert tool_use(None).tools == ()
    assert [t["function"]["name"] for t in tool_use(tools).tools] == ["f", "g"]
    assert tool_use(tools).strict == {"f"}
    assert tool_use(tools, "none").tools == ()
    assert tool_use(tools, "required").required
    assert not tool_use(tools, "auto", parallel=False).parallel
    named = tool_use(tools, {"type": "function", "function": {"name": "g"}})
    assert (len(named.tools), named.required, named.parallel) == (1, True, False)
    entry = {"type": "function", "function": {"name": "f"}}
    allowed = tool_use(tools, {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [entry]}})
    assert (len(allowed.tools), allowed.required) == (1, False)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("maybe", "tool_choice"),
        (3, "tool_choice"),
        ({"type": "function"}, "tool_choice"),
        ({"type": "function", "function": {"name": "h"}}, "tool_choice"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools.tools"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "h"}}]},
            },
            "tool_choice.allowed_tools.tools",
        ),
    ],
)
def test_wrong_choices_are_refused(choice: object, param: str):
    with pytest.raises(InvalidRequest) as caught:
        tool_use([tool()], choice)
    assert caught.value.param == param


def test_of_two_tools_with_one_name_the_last_one_counts():
    use = tool_use([tool("f", strict=True), tool("g"), tool("f", description="last")])
    assert [one["function"]["name"] for one in use.tools] == ["f", "g"]
    assert use.tools[0]["function"]["description"] == "last"
    assert not use.strict


def test_tools_are_ordered_by_their_names():
    tools = check_tools([tool("b"), tool("a"), tool("B")])
    assert [one["function"]["name"] for one in by_name(tools)] == ["B", "a", "b"]


def test_too_many_or_too_large_tools_are_refused():
    assert len(check_tools([tool(f"f{i}") for i in range(MAX_TOOLS)])) == MAX_TOOLS
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TOOLS} entries, got 2000"):
        check_tools([tool(f"f{i}") for i in range(2_000)])
    with pytest.raises(InvalidRequest, match=f"at most {MAX_TOOLS_BYTES} bytes"):
        check_tools([tool(description="x" * MAX_TOOLS_BYTES)])
    deep: dict[str, object] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match=f"at most {MAX_SCHEMA_DEPTH} levels"):
        check_tools([tool(parameters={"properties": {"x": deep}})])
    while deep:  # unravelled here, since its end would take as many calls
        deep = deep["items"]  # type: ignore[assignment]
