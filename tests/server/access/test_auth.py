import anyio
import pytest

from troupellm.protocol.config.engine import EngineConfig, ServerConfig
from troupellm.protocol.errors import ConfigError
from troupellm.server.access.auth import Gate
from troupellm.server.base.errors import HttpError
from troupellm.server.serve.run import serve

OPEN = frozenset({b"/livez"})


@pytest.fixture
def gate() -> Gate:
    return Gate(["secret", "other"], OPEN)


@pytest.mark.parametrize("header", [b"Bearer secret", b"bearer other", b"BEARER   secret "])
def test_any_configured_key_opens(gate, header):
    gate.check(b"/v1/models", [header])


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [b""],
        [b"secret"],
        [b"Bearer"],
        [b"Bearer "],
        [b"Bearer wrong"],
        [b"Bearer secret other"],
        [b"Basic secret"],
        [b"Bearer secret", b"Bearer secret"],
        [b"Bearer " + b"x" * 1_000_000],
        ["Bearer schlüssel".encode()],
        [b"Bearer \xff\xfe"],
    ],
    ids=range(12),
)
def test_everything_else_is_refused_alike(gate, headers):
    with pytest.raises(HttpError) as caught:
        gate.check(b"/v1/models", headers)
    assert caught.value.status == 401
    assert caught.value.headers == ((b"www-authenticate", b"Bearer"),)
    assert caught.value.message == _refusal(gate)


def _refusal(gate: Gate) -> str:
    with pytest.raises(HttpError) as caught:
        gate.check(b"/v1/models", [])
    return caught.value.message


@pytest.mark.parametrize("key", ["", " ", " a", "a ", "a\n", "a\x00b"])
def test_a_key_that_nobody_could_send_is_refused(key):
    with pytest.raises(ConfigError, match=r"^api_key: a key must be "):
        Gate([key], OPEN)


@pytest.mark.parametrize("path", [b"/livez/", b"//livez", b"/%6civez", b"/v1/../livez", b"/LIVEZ", b"/unknown"])
def test_only_the_exact_open_path_is_open(gate, path):
    gate.check(b"/livez", [])
    with pytest.raises(HttpError):
        gate.check(path, [])


def test_non_ascii_keys_work():
    Gate(["schlüssel"], OPEN).check(b"/v1/models", ["Bearer schlüssel".encode()])


@pytest.mark.parametrize("keys", [[], (), None])
def test_without_keys_everything_is_open(keys):
    Gate(keys, OPEN).check(b"/v1/models", [])


def test_one_text_is_one_key_and_not_its_letters():
    gate = Gate("secret", OPEN)
    gate.check(b"/v1/models", [b"Bearer secret"])
    for letter in b"secret":
        with pytest.raises(HttpError):
            gate.check(b"/v1/models", [b"Bearer " + bytes([letter])])


@pytest.mark.parametrize("keys", ["", " ", [""], ["secret", ""], ["secret", "\t"], [None], [b"secret"]])
def test_empty_keys_and_what_is_no_text_are_refused_at_start(keys):
    with pytest.raises(ConfigError) as caught:
        Gate(keys, OPEN)
    assert caught.value.param == "api_key"


@pytest.mark.parametrize("keys", ["", ("",), ("secret", " ")])
def test_keys_are_checked_before_anything_is_bound_or_loaded(keys):
    with pytest.raises(ConfigError):
        anyio.run(serve, EngineConfig(), ServerConfig(port=0, api_key=keys))


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [([], [b"secret"]), ([b"Bearer secret"], [b"secret"]), ([], [b" secret "])],
)
def test_a_key_may_come_as_anthropics_clients_send_it(gate, authorization, api_key):
    assert gate.check(b"/v1/messages", authorization, api_key).name == "key-1"


@pytest.mark.parametrize(
    ("authorization", "api_key"),
    [
        ([], [b"wrong"]),
        ([], [b""]),
        ([], [b"secret", b"secret"]),
        ([b"Bearer secret"], [b"wrong"]),
        ([b"Bearer wrong"], [b"secret"]),
        ([b"Bearer secret"], [b"other"]),
        ([b"Basic secret"], [b"secret"]),
    ],
)
def test_of_two_headers_neither_may_be_wrong(gate, authorization, api_key):
    with pytest.raises(HttpError):
        gate.check(b"/v1/messages", authorization, api_key)
