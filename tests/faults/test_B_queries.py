"""Rows B1, B2, B12 and B15 of the fault table behind the question mark, on every route that reads something there.

Wrong values follow from the types that the routes read, so later routes are tested too. An admin route that misread a
value would act on it and end all requests: the canaries would notice.
"""

from typing import Any

import msgspec
import pytest
from msgspec.inspect import BoolType, FloatType, IntType, ListType, LiteralType, StrType, UnionType, VarTupleType

from troupellm.server.base.query import MAX_FIELDS
from troupellm.server.base.router import Route
from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.every_route import KEYS, chosen, path_of, stays_refused, with_keys

pytestmark = pytest.mark.anyio

ROUTES = [
    pytest.param(("/sleep", "/kv_events", "/start_profile"), id="some"),
    pytest.param((), id="every", marks=pytest.mark.slow),
]
NO_NUMBERS = ("", "x", "0x1", "1%202", "%C2%B2", "nan", "1e999")


def wrong_values(kind: Any) -> tuple[str, ...]:
    """Texts that are none of a type; none where every text is one."""
    match kind:
        case UnionType():
            (plain,) = (option for option in kind.types if not isinstance(option, msgspec.inspect.NoneType))
            return wrong_values(plain)
        case BoolType():
            return ("", "2", "maybe", "1.5")
        case IntType():
            return (*NO_NUMBERS, "1.5", *beyond(kind))
        case FloatType():
            return (*NO_NUMBERS, "inf", *beyond(kind))
        case LiteralType():
            return ("", "nobody", "x" * 5_000, str(kind.values[0]).upper(), f"{kind.values[0]}%00")
        case VarTupleType() | ListType():
            return wrong_values(kind.item_type)
        case StrType():
            return ("", "../x", "a%20b", "x%0A", "x" * 65) if kind.pattern else ()
        case _:
            raise AssertionError(f"tell here what is no {kind}")


def beyond(kind: Any) -> list[str]:
    """Numbers next to what may be."""
    low = [] if kind.ge is None else [str(kind.ge - 1)]
    return low if kind.le is None else [*low, str(kind.le + 1), "9" * 30]


def wrong_queries(route: Route) -> list[tuple[str, str]]:
    """The field that is wrong, if it is one, and the query."""
    told = msgspec.inspect.type_info(route.query)
    assert isinstance(told, msgspec.inspect.StructType)
    found = [(field.encode_name, value) for field in told.fields for value in wrong_values(field.type)]
    queries = [(name, f"{name}={value}") for name, value in found]
    queries += [(field.encode_name, f"{field.encode_name}=%ff") for field in told.fields]
    queries.append(("", "&".join(f"a{number}=1" for number in range(MAX_FIELDS + 1))))
    if told.cls.__struct_config__.forbid_unknown_fields:
        queries += [(name, f"{name}=1") for name in ("nobody", "__class__", "x" * 64)]
    return queries + [
        (field.encode_name, f"{field.encode_name}=1&{field.encode_name}=1")
        for field in told.fields
        if not isinstance(field.type, VarTupleType | ListType | UnionType)
    ]


@pytest.mark.parametrize("only", ROUTES)
async def test_B_rows_behind_the_question_mark(tiny_engine, only):
    async with tiny_engine() as engine, under_attack(engine, with_keys()) as attacked:
        wrong = []
        for route in chosen(attacked, only):
            if route.query is None:
                continue
            headers = {"authorization": f"Bearer {KEYS[route.scope]}"}
            for field, query in wrong_queries(route):
                answer = await attacked.client.request(route.method, f"{path_of(route)}?{query}", headers=headers)
                problem = stays_refused(route, answer, (400,))
                if problem is None and "%ff" not in query:
                    param = answer.json()["error"]["param"]
                    problem = None if str(param or "").startswith(field) else f"param {param}"
                wrong.append((route.method, route.path, query[:80], problem))
        assert wrong
        assert not [entry for entry in wrong if entry[3]]
        assert not engine.is_paused
        assert not engine.is_sleeping
