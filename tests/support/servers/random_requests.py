"""Random requests for every route of the table: odd values in pairs of fields or deep in a body, names that are there
and others, queries, uploads and damaged bodies. Only a server error is a wrong answer to one of them."""

import json
import random
from collections import deque
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import msgspec

from troupellm.protocol.api.chat import ChatRequest
from troupellm.server.base.router import Route
from troupellm.tests.support.servers.every_route import KEYS, MESSAGES, SAMPLES
from troupellm.tests.support.servers.fault_rows import ROWS

LASTING = {"/pause", "/sleep", "/start_profile", "/kv_events", "/debug/events"}
"""Routes whose work outlasts their answer, or whose answer has no end: they get queries that are refused."""
OFTEN = ("/v1/chat", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/conversations", "/invocations", "/api/")
"""Begin the paths of routes that get `WEIGHT` requests in a round; the others get one."""
WEIGHT = 8
LONGEST = 10_000
"""Characters of a value, as text."""
MOST_NAMES = 200

ODD: tuple[Any, ...] = (
    None, True, 0, 5, -1, 1.5, "", "x", "auto", "ü\x00\ud800", [], {}, [5], ["x"], [None], [{}], [[]], {"type": "x"},
    {"a": {"b": []}}, {"type": "object"}, 2**63, "2026-01-01", {"type": "function", "function": {}}, [{"type": "text"}],
    [{"type": "message", "role": "user", "content": []}], {"role": "user"}, "data:,", {"enabled": True},
)  # fmt: skip
"""For every field, beside those that the rows of the fault table have for it."""
ODD_NAMES = ("nobody", "x" * 600, "%00", "%ff", "%2e%2e", "a%2Fb", "%F0%9F%A6%8A", "conv_x", "resp_x", "file-x", "tiny")
MANY_FIELDS = "&".join(f"a{number}=1" for number in range(99))
QUERIES = (
    "limit=2", "limit=0", "limit=x", "order=asc", "order=up", "after=nobody", "before_id=x", "after_id=%ff",
    "stream=true", "stream=2", "starting_after=1", "starting_after=-1", "purpose=batch", "level=1", "level=9",
    "mode=wait", "tags=weights", "a=1&a=1", "%00=%00", MANY_FIELDS,
)  # fmt: skip
REFUSED_QUERIES = ("nobody=1", "level=x&mode=x&after=x&folder=..%2fx&nobody=1", "%ff=1&nobody=1")
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
_CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]},
        *MESSAGES,
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}},
    "stream_options": {"include_usage": True, "continuous_usage_stats": False},
    "max_tokens": 3,
}
_ITEMS: list[Any] = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "Hm."}],
        "encrypted_content": None,
    },
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "id": "fc_1"},
    {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "1"}]},
    {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
    {"type": "compaction", "encrypted_content": "trp1.eJwDAAAAAAE"},
    {"type": "local_shell_call", "call_id": "c3", "action": {"type": "exec", "command": ["ls"]}, "status": "completed"},
    {"type": "agent_message", "author": "a", "recipient": "b", "content": [{"type": "encrypted_content"}]},
]
_RESPONSES: dict[str, Any] = {
    "input": _ITEMS,
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}, {"type": "custom", "name": "patch"}],
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}, "verbosity": "low"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "include": ["reasoning.encrypted_content"],
    "truncation": "auto",
    "max_output_tokens": 3,
}
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": "s"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "1"}]}],
    },
]
_ANTHROPIC: dict[str, Any] = {
    "messages": _BLOCKS,
    "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
    "tools": [{"name": "f", "input_schema": SCHEMA}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": 1}}]},
    "max_tokens": 3,
}
_OLLAMA: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Be brief."},
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_name": "f", "content": "1"},
    ],
    "tools": [TOOL],
    "format": SCHEMA,
    "options": {"num_predict": 3, "num_ctx": 64, "temperature": 0.5, "stop": ["x"], "mirostat": 1},
    "keep_alive": "5m",
    "logprobs": True,
    "top_logprobs": 2,
}
RICH: dict[str, dict[str, Any]] = {
    "/api/chat": _OLLAMA,
    "/api/generate": {"prompt": "Hi", "system": "Be brief.", "raw": False, "options": {"num_predict": 3, "seed": -1}},
    "/v1/chat/completions": _CHAT,
    "/v1/chat/completions/render": _CHAT,
    "/invocations": _CHAT,
    "/v1/responses": _RESPONSES,
    "/v1/responses/input_tokens": _RESPONSES,
    "/v1/responses/compact": {"input": _ITEMS},
    "/v1/conversations": {"items": _ITEMS, "metadata": {"a": "b"}},
    "/v1/conversations/{conversation_id}/items": {"items": _ITEMS},
    "/v1/messages": _ANTHROPIC,
    "/v1/messages/count_tokens": _ANTHROPIC,
    "/v1/messages/batches": {"requests": [{"custom_id": "a", "params": _ANTHROPIC}]},
    "/v2/embed": {"inputs": [{"content": [{"type": "text", "text": "Hi"}]}], "embedding_types": ["float", "int8"]},
    "/v1/load_lora_adapter": {"lora_name": "sql", "lora_path": "sql", "load_inplace": True},
}
"""Bodies with more in them, to be changed deep inside."""


class Sent(msgspec.Struct, frozen=True):
    route: Route
    target: str
    content: bytes
    headers: dict[str, str]


class RandomRequests:
    """Makes requests. `names` are those of objects that answers have named; its user adds to them."""

    def __init__(self, table: Sequence[Route], seed: int) -> None:
        self._chance = random.Random(seed)
        self._table = table
        self.names: deque[str] = deque(ODD_NAMES, MOST_NAMES)
        self._values: dict[str, list[Any]] = {}
        for row in ROWS.values():
            for values in row:
                for field in values.fields:
                    given = [*values.types, *values.ranges, *values.odd]
                    self._values.setdefault(field, []).extend(each for each in given if len(str(each)) < LONGEST)
        self._fields = {route.path: _fields_of(route) for route in table if route.body is not None}

    def requests(self, number: int) -> Iterator[Sent]:
        """So many, one route after the other."""
        turns = [route for route in self._table for _ in range(WEIGHT if _is_often(route) else 1)]
        for place in range(number):
            yield self._request(turns[place % len(turns)])

    def _request(self, route: Route) -> Sent:
        headers = {"authorization": f"Bearer {KEYS[route.scope]}"}
        content = b""
        if route.form is not None:
            content, headers["content-type"] = self._upload(route.form)
        elif route.body is not None or self._one_in(10):
            content = self._body(route)
            headers["content-type"] = "application/json"
        if self._one_in(40):
            headers["content-encoding"] = self._chance.choice(("gzip", "zstd", "deflate", "br"))
        return Sent(route, self._target(route), content, headers)

    def _target(self, route: Route) -> str:
        parts = route.path.split("/")
        path = "/".join(self._name() if part.startswith("{") else part for part in parts)
        path += self._name() if route.tail else ""
        if route.path in LASTING:
            return f"{path}?{self._chance.choice(REFUSED_QUERIES)}"
        return f"{path}?{self._chance.choice(QUERIES)}" if self._one_in(2 if route.query is not None else 10) else path

    def _body(self, route: Route) -> bytes:
        path = route.path
        if path not in self._fields:
            return b'{"a": 1}'
        if path in RICH and self._one_in(2):
            body = {"model": "tiny"} | deepcopy(RICH[path])
            for _ in range(self._chance.randrange(1, 3)):
                self._change(body)
        else:
            body = {"model": "tiny"} | SAMPLES[path]
            known = self._fields[path]
            for _ in range(2):
                field = self._chance.choice([*self._values] if self._one_in(10) else [*known])
                fits = field in known and self._one_in(2)
                body[field] = self._fitting(known[field]) if fits else self._value(field)
        if route.streams and self._one_in(2):
            body["stream"] = True
        content = json.dumps(body).encode()  # with halves of surrogate pairs, as JSON may have them
        return content[: len(content) // 2] if self._one_in(100) else content

    def _change(self, body: dict[str, Any]) -> None:
        """Put an odd value at a random place, or take the place away."""
        place: Any = body
        while True:
            key = self._chance.choice([*place] if isinstance(place, dict) else range(len(place)))
            if isinstance(place[key], dict | list) and place[key] and not self._one_in(4):
                place = place[key]
                continue
            if self._one_in(4):
                del place[key]
            else:
                place[key] = self._value(str(key))
            return

    def _value(self, field: str) -> Any:
        known = self._values.get(field)
        if known and not self._one_in(3):
            return deepcopy(self._chance.choice(known))  # a later change may go into it
        return self._name() if self._one_in(8) else deepcopy(self._chance.choice(ODD))

    def _fitting(self, kind: Any) -> Any:
        """A value that decodes as a type, as far as types go."""
        inspect = msgspec.inspect
        match kind:
            case inspect.Metadata():
                return self._fitting(kind.type)
            case inspect.UnionType():
                return self._fitting(self._chance.choice(kind.types))
            case inspect.NoneType():
                return None
            case inspect.BoolType():
                return self._one_in(2)
            case inspect.IntType():
                return self._chance.choice((0, 1, 2, 3, 20, -1, 2**31))
            case inspect.FloatType():
                return self._chance.choice((0.0, 0.5, 1.0, 2, -1.5))
            case inspect.StrType():
                return self._chance.choice(("", "x", "auto", "low", "1h", "ü\x00", "^a+$", "float", self._name()))
            case inspect.LiteralType():
                return self._chance.choice(kind.values)
            case inspect.ListType() | inspect.VarTupleType():
                return [self._fitting(kind.item_type) for _ in range(self._chance.randrange(3))]
            case inspect.DictType():
                return {f"k{place}": self._fitting(kind.value_type) for place in range(self._chance.randrange(3))}
            case inspect.StructType():
                wanted = [field for field in kind.fields if field.required or self._one_in(3)]
                tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
                return tag | {field.encode_name: self._fitting(field.type) for field in wanted}
            case _:
                return self._chance.choice(ODD)

    def _upload(self, form: type[msgspec.Struct]) -> tuple[bytes, str]:
        names = [*form.__struct_encode_fields__, "file", "nobody"]
        parts = []
        for name in self._chance.sample(names, self._chance.randrange(len(names) + 1)):
            file = '; filename="in.jsonl"' if name == "file" and not self._one_in(4) else ""
            value = self._chance.choice(("batch", "", "x", '{"custom_id": "a"}\n', "\x00", "86400", "created_at"))
            parts.append(f'--cut\r\ncontent-disposition: form-data; name="{name}"{file}\r\n\r\n{value}\r\n')
        end = "" if self._one_in(10) else "--cut--\r\n"
        return ("".join(parts) + end).encode(), "multipart/form-data; boundary=cut"

    def _name(self) -> str:
        return self._chance.choice(self.names)

    def _one_in(self, number: int) -> bool:
        return self._chance.randrange(number) == 0


def _is_often(route: Route) -> bool:
    return route.body is not None and route.path.startswith(OFTEN)


def _fields_of(route: Route) -> dict[str, Any]:
    """The types of the fields of its body, by name."""
    kinds = msgspec.inspect.type_info(ChatRequest if route.path == "/invocations" else route.body)
    structs = kinds.types if isinstance(kinds, msgspec.inspect.UnionType) else (kinds,)
    fields = {field.encode_name: field.type for kind in structs for field in getattr(kind, "fields", ())}
    assert fields, f"{route.path} has a body without fields"
    return fields
