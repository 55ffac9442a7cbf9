"""Rows B9 and B13 to B16 of the fault table: templates, labels, media, internal fields, and names of requests."""

import pytest

from troupellm.tests.support.servers.canary import under_many as under_attack
from troupellm.tests.support.servers.matrix import OK, check_matrix
from troupellm.tests.support.servers.serving import http_request, server_config

pytestmark = pytest.mark.anyio

CHAT = ("/v1/chat/completions",)
LONG = "x" * 2**20


async def test_B9_templates_and_their_variables(tiny_engine):
    name = "chat_template_kwargs"
    reserved = ("tokenize", "chat_template", "messages", "tools", "documents", "add_generation_prompt", "return_dict")
    cases = [({name: {key: 1}}, name) for key in (*reserved, "__class__", "_x", "bos_token", "a b", "", "x" * 2_000)]
    cases += [({name: {"a": value}}, name) for value in ([1], {"b": 1}, LONG)]
    cases += [({name: {f"a{number}": 1 for number in range(17)}}, name), ({name: {"thinking": True}}, OK)]
    cases += [({"chat_template": value}, "chat_template") for value in ("{{ 1 }}", "", LONG, 5, ["x"])]
    cases += [({"chat_template": None}, OK), ({"documents": [{"text": "x"}] * 1_025}, "documents")]
    cases += [({"documents": [{"text": "x"}]}, "documents"), ({"documents": []}, OK), ({"documents": None}, OK)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, routes=CHAT)


async def test_B9_templates_of_trusted_requests_stay_in_the_sandbox(tiny_engine):
    escapes = (
        "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__.os }}", "{% include '/etc/passwd' %}", "{% for",
        "{% for i in range(10**9) %}x{% endfor %}", "{{ 'x' * 10**10 }}", "{{ 10**(10**10) }}", "x" * 70_000,
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "{{ raise_exception('no') }}",
    )  # fmt: skip
    async with tiny_engine() as engine:
        config = server_config(trust_request_chat_template=True)
        async with under_attack(engine, config) as attacked:
            for template in escapes:
                for path in ("/v1/chat/completions", "/tokenize"):
                    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "chat_template": template}
                    response = await attacked.client.post(path, json=body | {"max_tokens": 2})
                    harmless = response.status_code == 200 and "root:" not in response.text
                    assert harmless or response.status_code == 400, (template, response.text)
                    assert harmless is False or "__" in template, (template, response.text)


async def test_B13_labels_are_bounded_and_show_nowhere(tiny_engine):
    odd = "../../\x00\u202e\u00fc"
    fields = ("user", "safety_identifier", "prompt_cache_key", "session_id")
    cases = [({field: value}, field) for field in fields for value in (5, [])]
    cases += [({field: value}, field) for field in fields[:-1] for value in ("x" * 513, LONG)]
    cases += [({"session_id": value}, OK) for value in ("x" * 513, LONG)]  # passed over, and named
    cases += [({field: value}, OK) for field in fields for value in ("", odd, None)]
    cases += [({"cache_salt": value}, "cache_salt") for value in ("", LONG, "a/b", "a\\b", "a@b", "a\x00b", 5)]
    cases += [({"cache_salt": "\u00fc" * 128}, OK)]
    wrong = ({f"k{number}": "v" for number in range(17)}, {"k" * 65: "v"}, {"k": "v" * 513}, "x", [])
    cases += [({"metadata": value}, "metadata") for value in wrong]
    cases += [({"metadata": {"k": 5}}, "metadata"), ({"metadata": {"k": odd}}, OK)]
    cases += [({"store": True}, "store"), ({"store": False}, OK), ({"service_tier": "best"}, "service_tier")]
    cases += [({"service_tier": tier}, OK) for tier in ("auto", "default", "flex", "scale", "priority", None)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases)
        shown = (await attacked.client.get("/metrics")).text
    assert "\u202e" not in shown
    assert "../.." not in shown


async def test_B14_media_are_refused_by_name(tiny_engine):
    def message(part):
        return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]}

    kinds = ("image_url", "input_audio", "video_url", "image_embeds", "file", "prompt_embeds", "refusal")
    url = "data:image/png;base64," + "A" * 2**20
    cases = [(message({"type": kind, kind: {"url": url}}), "messages[0].content[1]") for kind in kinds]
    many = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}] * 10_000
    cases += [({"messages": [{"role": "user", "content": many}]}, "messages[0].content[0]")]
    cases += [({"modalities": ["audio"]}, "modalities"), ({"audio": {"voice": "x"}}, "audio")]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases, routes=CHAT)


async def test_B15_fields_that_clients_may_not_set_are_refused(tiny_engine):
    fields = ("prompt_embeds", "kv_transfer_params", "ec_transfer_params", "mm_processor_kwargs", "media_io_kwargs")
    fields += ("prompt_logprob_token_ids", "watermarking", "return_weight_versions", "routed_experts_prompt_start")
    cases = [({field: value}, field) for field in fields for value in ("AAAA", {"a": 1})]
    cases += [(dict.fromkeys(fields, value), OK) for value in (None, False, {}, "")]
    name = "logits_processors"
    code = ([{"qualname": "os.system"}], [{"name": "x", "source": "import os"}], ["os.system"], {"os.system": {}}, [{}])
    cases += [({name: value}, name) for value in (*code, [{"name": "x", "args": [1]}], "os.system", 5)]
    cases += [({name: [{"name": "x", "more": 1}]}, name), ({name: []}, OK), ({name: {}}, OK)]
    cases += [({"vllm_xargs": value}, "vllm_xargs") for value in ({"nobody": 1}, {"x": LONG}, {"": 1}, 5)]
    unknown = ("__class__", "__init__", "self", "hf_overrides", "trust_remote_code", "model_path", "block_hashes")
    cases += [(dict.fromkeys(unknown, value), OK) for value in ({"a": [1]}, "x" * 1_000, None)]
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        await check_matrix(attacked, cases)


async def test_B16_a_request_keeps_its_name_if_it_may_have_one(tiny_engine):
    body = {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}
    async with tiny_engine() as engine, under_attack(engine) as attacked:
        for name in ("mine", "mine", "min", "m" * 128, "a.b:c-D_9"):
            answer = await attacked.client.post("/v1/completions", json=body, headers={"x-request-id": name})
            assert answer.headers["x-request-id"] == name
        for name in (b"m" * 129, b"m" * 10_000, b"a b", b"\xc3\xbc", b"<script>", b""):
            answer = await attacked.client.post("/v1/completions", json=body, headers={b"x-request-id": name})
            assert answer.status_code == 200
            assert len(answer.headers["x-request-id"]) == 32  # one of ours
        raw = http_request("/v1/completions", body).replace(
            b"\r\n\r\n", b"\r\nx-request-id: a\r\nset-cookie: b\r\n\r\n", 1
        )
        smuggler = await attacked.served.raw(raw)
        seen = await smuggler.read_until(b"[DONE]")
        await smuggler.close()
        assert b"set-cookie" not in seen.lower()
        # Two live requests of one name are two requests: both are answered, and each ends by itself.
        named = body | {"request_id": "twin", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        first = await attacked.served.raw(http_request("/v1/completions", named))
        await first.read_until(b"data: ")
        second = await attacked.client.post("/v1/completions", json=named | {"stream": False, "prompt": ["x", "y"]})
        assert second.json()["id"] == "cmpl-twin"
        assert second.json()["usage"]["completion_tokens"] == 120
        assert b"cmpl-twin" in await first.read_until(b"[DONE]")
        await first.close()
        wrong = ("", "a b", "x" * 129, "a\r\nb: c", "a\n", "\u00fc", 5)
        await check_matrix(attacked, [({"request_id": value}, "request_id") for value in wrong])
