"""Row B10 of the fault table, and C5, D3 and E4 where they concern guides: grammars that harm only their own request.

Each backend, as the server's own one, gets the hostile grammars.
"""

import json
import os
import signal
from typing import Any

import anyio
import psutil
import pytest

from troupellm.actors.guide import compiler as guide_compiler
from troupellm.actors.guide.actor import Guide
from troupellm.protocol.errors import EngineStopped
from troupellm.protocol.params.guide import MAX_SOURCE_BYTES, GuideSpec
from troupellm.tests.support.engines.fixtures import SETTINGS
from troupellm.tests.support.environment.absence import need_xgrammar
from troupellm.tests.support.servers.canary import resident_bytes, under_attack, under_many
from troupellm.tests.support.servers.matrix import OK, check_matrix
from troupellm.tests.support.servers.serving import eventually

pytestmark = pytest.mark.anyio

FIRST = GuideSpec(kind="choice", source='["a"]')
PATTERNS = {"type": "object", "patternProperties": {f"^[a-z]*{n}[a-z]*$": {"const": n} for n in range(300)}}
"""Takes llguidance seconds to compile."""
XGRAMMAR = pytest.param("xgrammar", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")])
SERVED_BY: dict[str, dict[str, Any]] = {
    "llguidance": {},
    "xgrammar": {"guide_backend": "xgrammar", "guide_timeout": 5.0, "guide_memory_bytes": 2**30},
}
"""Settings. xgrammar compiles ahead, and some of what cannot be is refused because that takes too long."""


@pytest.fixture(params=["llguidance", XGRAMMAR])
def backend(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name == "xgrammar":
        need_xgrammar()
    return name


def slow(backend: str, number: int) -> dict[str, Any]:
    """Takes seconds to compile; another one for each number."""
    if backend == "llguidance":
        return {"json": PATTERNS | {"title": str(number)}}
    return {"choice": [f"{(n + number) * 11400714819323198485 % 2**64:020d}" for n in range(10_000)]}


def nested(levels: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


def compilers() -> list[psutil.Process]:
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if any("compile_main" in word for word in child.cmdline())]


def guide_field(**wanted: Any) -> dict[str, Any]:
    return {"structured_outputs": wanted}


def schema_field(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


REFUSED = [
    *(
        (schema_field(schema), "response_format.json_schema")
        for schema in (
            {"type": "frog"},
            {"enum": []},
            {"not": {}},
            {"$ref": "https://example.com/x.json"},
            {"$ref": "file:///etc/passwd"},
            {"$ref": "#/nowhere"},
            {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            {"type": "string", "pattern": "("},
            {"minimum": "x"},
            False,
            {"allOf": [{"anyOf": [{"required": [f"p{i}{j}"]} for j in range(8)]} for i in range(12)]},
        )
    ),
    *(
        (guide_field(json=text), "structured_outputs.json")
        for text in (
            "{",
            "nothing",
            "[" * 60_000,
            '{"a":' * 60_000,
            '{"const": "\\ud800"}',
            '{"enum": [1e400]}',
            '{"const": NaN}',
            '{"const": ' + "9" * 5000 + "}",
            '{"required": ["\\udc00"]}',
            '{"not": {}, "x-guidance": {"lenient": true}}',
        )
    ),
    *(
        (guide_field(regex=text), "structured_outputs.regex")
        for text in (
            "(",
            "",
            "a" * (MAX_SOURCE_BYTES + 1),
            "(" * 30_000,
            "[z-a]",
            "(?=a)b",
            "(a)\\1",
            "a\x00",
            "\\p{Nothing}",
        )
    ),
    *(
        (guide_field(grammar=text), "structured_outputs.grammar")
        for text in (
            "",
            "start: nothing",
            "start: (",
            "root ::= [",
            "root ::= " + "(" * 20_000,
            "::=",
            "no rules at all",
        )
    ),
    *((guide_field(choice=values), "structured_outputs.choice") for values in ([], [""], ["a"] * 10_001)),
    *(
        (guide_field(structural_tag=tag), "structured_outputs.structural_tag")
        for tag in (
            {},
            {"format": 1},
            {"format": {"type": "frog"}},
            {"structures": [], "triggers": []},
            "{",
            {"format": {"type": "tag", "begin": 1, "content": {"type": "any_text"}, "end": "x"}},
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "any_text"}]}},
            {"format": {"type": "any_text", "excludes": "x"}},
        )
    ),
    (guide_field(), "structured_outputs"),
    (guide_field(json={}, regex="a"), "structured_outputs"),
    (guide_field(regex="a", backend="outlines"), "structured_outputs.backend"),
    (guide_field(regex="a") | {"guided_regex": "b"}, "guided_regex"),
    ({"guided_json": {"not": {}}}, "guided_json"),
    ({"guided_grammar": "start: nothing"}, "guided_grammar"),
    ({"use_beam_search": True, "temperature": 0, "guided_regex": "a"}, "guided_regex"),
]
DOUBLED = "start: A0\n" + "\n".join(f"A{n}: A{n + 1} A{n + 1}" for n in range(60)) + "\nA60: /[a-z]/"
"""A text of 2**60 letters: xgrammar may begin one."""


@pytest.mark.parametrize("sparse", [True, pytest.param(False, marks=pytest.mark.slow)])
async def test_B10_impossible_guides_are_refused_by_name(tiny_engine, sparse):
    doubled = guide_field(grammar=DOUBLED), "structured_outputs.grammar"
    async with tiny_engine() as engine:
        await engine.generate([5], guide=FIRST, max_tokens=2)
        pids = [child.pid for child in compilers()]
        async with under_attack(engine, canary_tokens=300, rest=0.3) as attacked:
            await check_matrix(attacked, [*REFUSED, doubled], sparse=sparse)
        assert [child.pid for child in compilers()] == pids  # none of them costs its process
        assert engine.snapshot().guide.refused > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("backend", [XGRAMMAR], indirect=True)
async def test_B10_impossible_guides_are_refused_by_the_second_backend_too(tiny_engine, backend):
    async with tiny_engine(**SERVED_BY[backend]) as engine:
        await engine.generate([5], guide=FIRST, max_tokens=2)
        async with under_attack(engine, canary_tokens=24, rest=0.3) as attacked:
            # It can tell two free texts apart that llguidance cannot.
            refused = [case for case in REFUSED if "'any_text'}, {'type': 'any_text'" not in str(case)]
            assert len(refused) == len(REFUSED) - 1
            await check_matrix(attacked, refused, sparse=True)
        assert (await engine.generate([5], guide=FIRST, max_tokens=2)).choices[0].text == "a"


async def test_B10_a_backend_that_the_operator_left_out_is_refused_by_name(tiny_engine):
    left_out = [
        (guide_field(regex="a", backend="xgrammar"), "structured_outputs.regex"),
        ({"guided_regex": "a", "guided_decoding_backend": "xgrammar"}, "guided_regex"),
        (guide_field(regex="a", backend="guidance"), OK),
        (guide_field(regex="a"), OK),
    ]
    async with tiny_engine(guide_backends=["guidance"]) as engine, under_many(engine) as attacked:
        await check_matrix(attacked, left_out)
        body = {"model": "tiny", "prompt": "Hi"} | left_out[0][0]
        error = (await attacked.client.post("/v1/completions", json=body)).json()["error"]
        assert error["code"] == "unsupported_parameter"
        assert "xgrammar may not be chosen on this server; use one of llguidance" in error["message"]
        assert engine.snapshot().guide.compiles == 1


async def test_B10_a_response_format_of_a_wrong_type_is_refused(tiny_engine):
    cases = [({"response_format": value}, "response_format") for value in (1, "json_object", [], True)]
    cases += [({"response_format": {"type": value}}, "response_format.type") for value in (None, "xml", 1, [])]
    wrapped = (None, 1, {"schema": 5}, {"schema": {}, "strict": 1}, {"schema": {}, "name": 1}, {})
    for wrapper in wrapped:
        name = next((key for key in ("strict", "name") if isinstance(wrapper, dict) and key in wrapper), "schema")
        param = f"response_format.json_schema.{name}" if isinstance(wrapper, dict) else "response_format.json_schema"
        cases.append(({"response_format": {"type": "json_schema", "json_schema": wrapper}}, param))
    cases += [({"structured_outputs": value}, "structured_outputs") for value in (1, "x", [], True)]
    cases += [
        (guide_field(frog=1), "structured_outputs"),
        (guide_field(json_object=1), "structured_outputs.json_object"),
    ]
    cases += [({"response_format": {"type": "text"}, "structured_outputs": None, "guided_regex": None}, OK)]
    async with tiny_engine() as engine, under_many(engine) as attacked:
        await check_matrix(attacked, cases)


async def test_B10_one_that_takes_too_long_costs_its_process_and_nobody_else(tiny_engine, backend):
    async with tiny_engine(**SERVED_BY[backend] | {"guide_timeout": 0.5}) as engine:
        await engine.generate([5], guide=FIRST, max_tokens=2)
        before = {child.pid for child in compilers()}
        async with under_attack(engine, canary_tokens=300, rest=0.3) as attacked, anyio.create_task_group() as group:
            answers = []

            async def ask(**wanted: Any) -> None:
                body = {"model": "tiny", "prompt": "Hi", "max_tokens": 8, **guide_field(**wanted)}
                answers.append((await attacked.client.post("/v1/completions", json=body)).json())

            for number in range(4):  # more than are compiled at once
                group.start_soon(lambda number=number: ask(**slow(backend, number)))
            await eventually(lambda: engine.snapshot().guide.waiting == 4)
            group.start_soon(lambda: ask(regex="[ab]c"))
        refused = [answer["error"] for answer in answers if "error" in answer]
        (kind,) = slow(backend, 0)
        assert [(error["param"], error["code"]) for error in refused] == [
            (f"structured_outputs.{kind}", "invalid_schema")
        ] * 4
        assert all("takes longer than 0.5 s" in error["message"] for error in refused)
        served = [answer["choices"][0]["text"] for answer in answers if "choices" in answer]
        assert len(served) == 1
        assert served[0] in ("ac", "bc")
        assert "choices" not in answers[-1]  # the quick one does not wait until all slow ones are through
        again = await engine.generate([5], guide=FIRST, max_tokens=2)
        assert again.choices[0].text == "a"
        assert not before & {child.pid for child in compilers()}


async def test_B10_one_that_takes_too_much_memory_is_refused(tiny_engine, backend):
    objects = {"enum": [{}] * 80_000}  # 3 bytes each, and in memory dozens of times as much
    assert len(json.dumps(objects, separators=(",", ":"))) < MAX_SOURCE_BYTES
    limits = {"guide_memory_bytes": 4 * 2**20, "guide_timeout": 60.0}
    async with tiny_engine(**SERVED_BY[backend] | limits) as engine:
        await engine.generate([5], guide=FIRST, max_tokens=2)
        async with under_attack(engine) as attacked:
            await check_matrix(attacked, [(schema_field(objects), "response_format.json_schema")])
        assert (await engine.generate([5], guide=FIRST, max_tokens=2)).choices[0].text == "a"


AMBIGUOUS = 'start: e "!"\ne: "a" | "b" | e e | e e e | e e e e | e e e e e'
"""Tiny, compiled at once, its first masks are cheap; each token multiplies the ways to read the text."""


async def test_B10_an_ambiguous_grammar_ends_its_own_request_alone(tiny_engine, backend):
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 150, "temperature": 1.0, "ignore_eos": True}
    async with tiny_engine(**SERVED_BY[backend]) as engine:
        await engine.generate([5], guide=FIRST, max_tokens=2)
        async with under_attack(engine, canary_tokens=100, rest=0.3) as attacked:
            letters = engine.tokenizer.encode("ba", add_special_tokens=False)
            wanted = body | {"n": 64, "allowed_token_ids": letters} | guide_field(grammar=AMBIGUOUS)  # it cannot end
            answer = await attacked.client.post("/v1/completions", json=wanted)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["type"], error["param"], error["code"]) == (
                "invalid_request_error",
                "structured_outputs.grammar",
                "invalid_schema",
            )
            streamed = wanted | {"n": 1, "stream": True}
            async with attacked.client.stream("POST", "/v1/completions", json=streamed) as told:
                assert told.status_code == 200
                lines = [json.loads(line[6:]) async for line in told.aiter_lines() if line.startswith("data: {")]
            assert lines[-1]["error"]["code"] == "invalid_schema"
            dead_end = guide_field(choice=["yes", "no"]) | {"allowed_token_ids": [3]}
            await check_matrix(attacked, [(dead_end, "structured_outputs.choice")])
        assert engine.snapshot().scheduler.worker_losses == 0
        await eventually(lambda: engine.snapshot().scheduler.blocks_used == 0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_schemas", [80, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_C5_schemas_that_nobody_repeats_stay_within_the_cache(tiny_engine, num_schemas):
    capacity = 32 * 1024
    async with tiny_engine(guide_cache_bytes=capacity) as engine:

        async def ask(number: int) -> None:
            choice = GuideSpec(kind="choice", source=json.dumps([f"{number:05d}"]))
            text = (await engine.generate([5], guide=choice, max_tokens=10)).choices[0].text
            assert text == f"{number:05d}"

        for number in range(40):
            await ask(number)
        resident = resident_bytes()
        async with under_attack(engine):
            for begin in range(40, num_schemas, 8):
                async with anyio.create_task_group() as group:
                    for number in range(begin, min(begin + 8, num_schemas)):
                        group.start_soon(ask, number)
                assert engine.snapshot().guide.cached_bytes <= capacity
        guide = engine.snapshot().guide
        assert guide.compiles == num_schemas
        assert guide.evicted == num_schemas - guide.cached > 0
        assert resident_bytes() - resident < 64 * 2**20
        kept, early = engine.snapshot().guide.hits, 0
        await ask(num_schemas - 1)
        await ask(early)
        after = engine.snapshot().guide
        assert (after.hits - kept, after.compiles - num_schemas) == (1, 1)


async def test_D3_leaving_while_the_guide_is_compiled(tiny_engine):
    async with tiny_engine(guide_timeout=30.0) as engine:
        await engine.generate([5], guide=FIRST, max_tokens=2)
        (compiler,) = compilers()
        async with under_attack(engine) as attacked:
            os.kill(compiler.pid, signal.SIGSTOP)
            for stream in (False, True):
                body = {"model": "tiny", "prompt": "Hi", "stream": stream, **guide_field(regex=f"a{stream}")}
                with anyio.move_on_after(30) as leaving:
                    async with anyio.create_task_group() as group:
                        group.start_soon(lambda body=body: attacked.client.post("/v1/completions", json=body))
                        await eventually(lambda: engine.snapshot().guide.waiting == 1)
                        group.cancel_scope.cancel()
                assert not leaving.cancelled_caught
                await eventually(lambda: engine.snapshot().guide.waiting == 0, 1)
            os.kill(compiler.pid, signal.SIGCONT)
            assert (await engine.generate([5], guide=FIRST, max_tokens=2)).choices[0].text == "a"
        assert engine.snapshot().scheduler.blocks_used == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_where_no_process_can_be_started_clients_are_told_to_come_again(tiny_engine, monkeypatch, stream):
    there = guide_compiler.MODULE
    monkeypatch.setattr(guide_compiler, "MODULE", "troupellm.nothing")
    body = {"model": "tiny", "prompt": "Hi", "max_tokens": 2, "stream": stream} | guide_field(choice=["a"])
    async with tiny_engine() as engine, under_attack(engine, canary_tokens=24) as attacked:
        refused = await attacked.client.post("/v1/completions", json=body)
        assert (refused.status_code, refused.headers["x-should-retry"]) == (503, "true")
        assert refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "engine_restarting"
        monkeypatch.setattr(guide_compiler, "MODULE", there)
        assert (await attacked.client.post("/v1/completions", json=body)).status_code == 200


async def test_E4_a_crash_of_the_guide_actor_answers_its_request(tiny_engine, monkeypatch):
    received = Guide._receive

    async def crash(self: Guide, message: Any, start: Any) -> None:
        if message.spec.source == "crash":
            raise RuntimeError("injected")
        await received(self, message, start)

    monkeypatch.setattr(Guide, "_receive", crash)
    async with tiny_engine() as engine:
        await engine.generate([5], guide=FIRST, max_tokens=2)
        async with under_attack(engine):
            with pytest.raises(EngineStopped) as ended:
                await engine.generate([5], guide=GuideSpec(kind="regex", source="crash"), max_tokens=2)
            assert ended.value.code == "engine_restarting"
            assert (await engine.generate([5], guide=FIRST, max_tokens=2)).choices[0].text == "a"
        restarts = {actor.name: actor.restarts for actor in engine.snapshot().actors}
        assert restarts["guide"] == 1


def test_the_processes_end_with_the_engine(checkpoint):
    from troupellm import LLM, SamplingParams

    with LLM(str(checkpoint), **SETTINGS) as llm:
        llm.generate("Hi", SamplingParams(guide=FIRST, max_tokens=2), use_tqdm=False)
        assert len(compilers()) == 1
    assert not compilers()
