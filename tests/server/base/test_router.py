import pytest

from troupellm.server.base.errors import HttpError
from troupellm.server.base.router import Route, Router


async def handler(exchange, body):
    raise AssertionError("never called here")


@pytest.fixture
def router() -> Router:
    return Router(
        [
            Route(method="GET", path="/v1/models", handler=handler),
            Route(method="GET", path="/v1/models/", handler=handler, tail=True),
            Route(method="POST", path="/v1/completions", handler=handler),
            Route(method="GET", path="/livez", handler=handler, scope="open"),
        ]
    )


@pytest.mark.parametrize(
    "path",
    [
        b"/",
        b"",
        b"/v1",
        b"//v1/models",
        b"/v1//models",
        b"/v1/models/",
        b"/v1/./models",
        b"/v1/../livez",
        b"/v1/%2e%2e/livez",
        b"/v1%2fmodels",
        b"/%761/models",
        b"/V1/models",
        b"/v1/completions/",
        b"/v1/models/../completions",
        b"/v1/models/a//b",
        b"/v1/models/%2e%2e/%2e%2e/livez",
        b"http://host/v1/models",
    ],
)
def test_a_path_in_another_spelling_is_unknown(router, path):
    with pytest.raises(HttpError) as caught:
        router.match("GET", path)
    assert (caught.value.status, caught.value.code) == (404, "unknown_url")


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [("GET", b"/v1/completions", b"POST"), ("POST", b"/v1/models", b"GET, HEAD"), ("PUT", b"/livez", b"GET, HEAD")],
)
def test_wrong_verb_says_what_is_allowed(router, method, path, allow):
    with pytest.raises(HttpError) as caught:
        router.match(method, path)
    assert caught.value.status == 405
    assert dict(caught.value.headers)[b"allow"] == allow


def test_head_is_answered_where_get_is(router):
    assert router.match("HEAD", b"/livez")[0].path == "/livez"


@pytest.mark.parametrize(
    ("raw", "tail"), [(b"/v1/models/org/name", "org/name"), (b"/v1/models/org%2Fname", "org/name")]
)
def test_tail_may_hold_slashes_in_both_spellings(router, raw, tail):
    assert router.match("GET", raw)[1].tail == tail


@pytest.mark.parametrize(
    ("raw", "root", "expected"),
    [
        (b"/llm/v1/models", "/llm", b"/v1/models"),
        (b"/llm/v1/models", "/llm/", b"/v1/models"),
        (b"/llm/v1/models/a/b", "/llm", b"/v1/models/a/b"),
        (b"/llm/livez", "/llm", b"/livez"),
        (b"/v1/models", "/llm", b"/v1/models"),
        (b"/v1/models", "/v1", b"/v1/models"),
        (b"/v1/v1/models", "/v1", b"/v1/models"),
        (b"/llmx/livez", "/llm", b"/llmx/livez"),
        (b"/llm", "/llm", b"/llm"),
        (b"/llm/", "/llm", b"/llm/"),
        (b"/livez", "/livez", b"/livez"),
        (b"/v1/models", "", b"/v1/models"),
        (b"/v1/models", "/", b"/v1/models"),
        (b"/llm/nowhere", "/llm", b"/llm/nowhere"),
    ],
)
def test_a_root_path_is_taken_off_only_where_a_route_remains(router, raw, root, expected):
    assert router.below(raw, root) == expected


def test_only_open_routes_are_listed_as_open(router):
    assert router.open_paths == {b"/livez"}


@pytest.fixture
def stored() -> Router:
    return Router(
        [
            Route(method="GET", path="/v1/answers", handler=handler),
            Route(method="GET", path="/v1/answers/{answer_id}", handler=handler),
            Route(method="DELETE", path="/v1/answers/{answer_id}", handler=handler),
            Route(method="POST", path="/v1/answers/{answer_id}/cancel", handler=handler),
            Route(method="POST", path="/admin/pause", handler=handler, scope="admin"),
        ]
    )


@pytest.mark.parametrize(
    ("method", "raw", "path", "values"),
    [
        ("GET", b"/v1/answers/abc", "/v1/answers/{answer_id}", {"answer_id": "abc"}),
        ("DELETE", b"/v1/answers/a%20b", "/v1/answers/{answer_id}", {"answer_id": "a b"}),
        ("POST", b"/v1/answers/abc/cancel", "/v1/answers/{answer_id}/cancel", {"answer_id": "abc"}),
        ("GET", b"/v1/answers/cancel", "/v1/answers/{answer_id}", {"answer_id": "cancel"}),
        ("GET", b"/v1/answers", "/v1/answers", {}),
    ],
)
def test_names_in_a_path_stand_for_one_part_each(stored, method, raw, path, values):
    route, found = stored.match(method, raw)
    assert (route.path, found.values) == (path, values)


@pytest.mark.parametrize(
    "raw",
    [
        b"/v1/answers/",
        b"/v1/answers//cancel",
        b"/v1/answers/../cancel",
        b"/v1/answers/%2e%2e",
        b"/v1/answers/a%2Fb",
        b"/v1/answers/a/b",
        b"/v1/answers/" + b"x" * 10_000,
    ],
)
def test_paths_with_wrong_names_match_no_route(stored, raw):
    with pytest.raises(HttpError):
        stored.match("GET", raw)


def test_a_wrong_verb_on_a_path_with_names_says_what_is_allowed(stored):
    with pytest.raises(HttpError) as caught:
        stored.match("PUT", b"/v1/answers/abc")
    assert dict(caught.value.headers)[b"allow"] == b"DELETE, GET, HEAD"


def test_errors_below_the_path_of_an_api_have_its_shape():
    messages = Route(method="POST", path="/v1/messages", handler=handler, error_shape="anthropic")
    router = Router([messages, Route(method="GET", path="/v1/models", handler=handler)])
    paths = (b"/v1/messages", b"/v1/messages/x/y")
    shaped = {path for path in paths if router.error_shape(path, router.find(path)) == "anthropic"}
    assert len(shaped) == 2
    for path in (b"/v1/models", b"/v1/models/x", b"/v1/messagesx", b"/nowhere"):
        assert router.error_shape(path, router.find(path)) == "openai"
