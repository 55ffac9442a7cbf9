"""Stored responses where several processes speak HTTP: a file that they share, or a refusal that says what to do."""

import json
import os
import signal

import pytest

from troupellm.tests.support.servers.fronts import fronts_process, until
from troupellm.tests.support.servers.processes import ON_A_THREAD
from troupellm.tests.support.servers.serving import http_request

pytestmark = pytest.mark.anyio

BODY = {"model": "tiny", "input": "Hi", "temperature": 0, "max_output_tokens": 8}
LONG = BODY | {"background": True, "max_output_tokens": 4000, "ignore_eos": True}


async def post(fronts, pid, path, body):
    """Status and body of what one front answers to a POST that closes its connection."""
    with await fronts.connect(pid, http_request(path, body, connection="close")) as connection:
        whole = await connection.read_all()
    head, _, rest = whole.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest.decode()


async def test_a_file_makes_all_fronts_know_the_same_responses(checkpoint, tmp_path):
    flags = (*ON_A_THREAD, "--responses-store", str(tmp_path / "responses.sqlite"))
    async with fronts_process(checkpoint, *flags) as fronts:
        one, two = fronts.pids
        made = json.loads((await post(fronts, one, "/v1/responses", BODY))[1])
        status, text = await fronts.get(two, f"/v1/responses/{made['id']}")
        assert (status, json.loads(text)) == (200, made)
        status, text = await post(fronts, two, "/v1/responses", BODY | {"previous_response_id": made["id"]})
        assert (status, json.loads(text)["previous_response_id"]) == (200, made["id"])

        running = json.loads((await post(fronts, one, "/v1/responses", LONG))[1])
        status, text = await post(fronts, two, f"/v1/responses/{running['id']}/cancel", {})
        assert (status, json.loads(text)["status"]) == (200, "cancelled")

        async def nothing_runs() -> bool:
            return not await fronts.metric(one, "troupellm_requests_open")

        await until(nothing_runs)
        counted = {await fronts.metric(pid, "troupellm_responses_stored") for pid in (one, two)}
        assert counted == {3.0}, "of the whole server, whoever is asked"

        short = LONG | {"max_output_tokens": 200, "stream": True}
        with await fronts.connect(one, http_request("/v1/responses", short, connection="close")) as connection:
            seen = await connection.read_until(b"response.in_progress")
            name = "resp_" + seen.partition(b'"id":"resp_')[2][:32].decode()
            # Event 2 is there already: its stream begins while the other front stands still.
            _, followed = await fronts.get(two, f"/v1/responses/{name}?stream=true&starting_after=1")
        assert followed.count("event: response.in_progress") == 1
        assert "event: response.queued" not in followed
        assert "event: response.incomplete" in followed


@pytest.mark.slow
async def test_responses_of_a_front_that_died_have_failed(checkpoint, tmp_path):
    async with fronts_process(checkpoint, "--responses-store", str(tmp_path / "responses.sqlite")) as fronts:
        one, two = fronts.pids
        running = json.loads((await post(fronts, one, "/v1/responses", LONG))[1])
        os.kill(one, signal.SIGKILL)

        async def told() -> bool:
            status, text = await fronts.get(two, f"/v1/responses/{running['id']}")
            return status == 200 and json.loads(text)["status"] == "failed"

        await until(told, 30)


@pytest.mark.slow
async def test_without_a_file_several_fronts_keep_nothing_and_say_so(checkpoint):
    async with fronts_process(checkpoint) as fronts:
        pid = fronts.pids[0]
        status, text = await post(fronts, pid, "/v1/responses", BODY)
        assert (status, json.loads(text)["store"]) == (200, False)
        for field in ({"store": True}, {"background": True}, {"previous_response_id": "resp_x"}):
            status, text = await post(fronts, pid, "/v1/responses", BODY | field)
            assert status == 400
            error = json.loads(text)["error"]
            assert error["param"] == next(iter(field))
            assert "--responses-store" in error["message"]
        assert fronts.server.logged("responses are not kept")
