import json

import anyio
import pytest

from troupellm.protocol.errors import (
    ContextLengthExceeded,
    EngineOverloaded,
    EngineStopped,
    InvalidRequest,
    ModelNotFound,
    QueueTimeout,
    RateLimited,
    RequestAborted,
    RequestFailed,
    WorkerCrashed,
)
from troupellm.server.base import errors


@pytest.mark.parametrize(
    ("error", "status", "kind", "code", "retry"),
    [
        (InvalidRequest("no", param="n"), 400, "invalid_request_error", "invalid_value", b"false"),
        (
            ContextLengthExceeded("long", limit=4, got=5),
            400,
            "invalid_request_error",
            "context_length_exceeded",
            b"false",
        ),
        (ModelNotFound("no"), 404, "invalid_request_error", "model_not_found", b"false"),
        (EngineOverloaded("full", retry_after=2.5), 429, "rate_limit_error", "slow_down", b"true"),
        (EngineStopped("bye"), 503, "service_unavailable_error", "draining", b"true"),
        (WorkerCrashed("boom"), 503, "service_unavailable_error", "engine_restarting", b"true"),
        (RequestAborted("late"), 503, "service_unavailable_error", "request_aborted", b"true"),
        (RequestFailed("nan"), 500, "server_error", "engine_request_failed", b"false"),
        (errors.unknown_url(), 404, "invalid_request_error", "unknown_url", b"false"),
        (errors.body_timeout(2), 408, "invalid_request_error", "request_timeout", b"true"),
        (errors.not_ready("no", code="starting"), 503, "service_unavailable_error", "starting", b"true"),
    ],
)
def test_each_error_has_its_status_and_shape(error, status, kind, code, retry):
    answer = errors.answer(error)
    body = json.loads(answer.body)
    assert answer.status == status
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    assert dict(answer.headers)[b"x-should-retry"] == retry


@pytest.mark.parametrize(
    ("error", "code"), [(EngineOverloaded("full"), "slow_down"), (RateLimited("spent"), "rate_limit_exceeded")]
)
def test_overload_can_be_a_503_for_balancers(error, code):
    answer = errors.answer(error, overload_status=503)
    shown = json.loads(answer.body)["error"]
    headers = dict(answer.headers)
    assert (answer.status, shown["type"], shown["code"]) == (503, "service_unavailable_error", code)
    assert (headers[b"x-should-retry"], b"retry-after" in headers) == (b"true", True)
    anthropic = errors.answer(error, shape="anthropic", overload_status=503)
    assert (anthropic.status, json.loads(anthropic.body)["error"]["type"]) == (503, "overloaded_error")


@pytest.mark.parametrize(
    "error",
    [InvalidRequest("no"), QueueTimeout("late"), RequestFailed("nan"), errors.too_large(1), EngineStopped("bye")],
)
def test_no_other_error_has_the_status_of_overload(error):
    usual, other = errors.answer(error), errors.answer(error, overload_status=503)
    assert (other.status, other.body) == (usual.status, usual.body)


def test_retry_after_is_whole_seconds_and_small():
    waits = {
        dict(errors.answer(EngineOverloaded("full", retry_after=seconds)).headers)[b"retry-after"]
        for seconds in (0.2, 2.5, 10_000.0)
        for _ in range(20)
    }
    assert {int(wait) for wait in waits} <= {1, 2, 3, 4, 60}


def test_the_error_inside_a_group_is_answered():
    group = BaseExceptionGroup("outer", [ExceptionGroup("inner", [InvalidRequest("no", param="n")])])
    assert errors.answer(group).status == 400


def test_foreign_errors_show_nothing_of_themselves(caplog):
    answer = errors.answer(RuntimeError("/secret/path 0x7f"))
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert json.loads(answer.body)["error"]["code"] == "internal_error"
    assert "/secret/path" in caplog.text


def test_messages_are_cut_and_parameters_renamed():
    answer = errors.answer(
        InvalidRequest("logprobs " + "x" * 2000, param="logprobs"), renames={"logprobs": "top_logprobs"}
    )
    body = json.loads(answer.body)["error"]
    assert len(body["message"]) == errors.MAX_MESSAGE
    assert body["param"] == "top_logprobs"
    assert body["message"].startswith("top_logprobs ")


def test_an_error_within_a_stream_has_its_code_in_the_message_too():
    told = errors.in_stream(errors.answer(WorkerCrashed("the worker died")))
    assert json.loads(told)["error"] == {
        "message": "the worker died (engine_restarting)",
        "type": "service_unavailable_error",
        "param": None,
        "code": "engine_restarting",
    }
    long = json.loads(errors.in_stream(errors.answer(RequestFailed("x" * 2000))))["error"]["message"]
    assert len(long) == errors.MAX_MESSAGE
    assert long.endswith("x (engine_request_failed)")


def test_progress_stands_beside_the_error():
    answer = errors.answer(errors.not_ready("loading", code="starting"), extra={"progress": {"phase": "weights"}})
    assert json.loads(answer.body)["progress"] == {"phase": "weights"}


@pytest.mark.anyio
async def test_clearing_an_error_leaves_coroutines_that_wait_with_its_cause():
    shared, go_on, ended = RuntimeError("the engine has failed"), anyio.Event(), []

    async def supervise() -> None:
        try:
            raise shared
        except RuntimeError:
            await go_on.wait()
        ended.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(supervise)
        await anyio.lowlevel.checkpoint()
        try:
            raise ValueError("refused") from shared
        except ValueError as error:
            errors.clear_locals(error)
        go_on.set()
    assert ended == [True]
