"""The measure of drafters that asks a running server."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from troupellm.load_tests.speculation.workloads import held_out
from troupellm.training.drafters_evaluate import prompts
from troupellm.training.drafters_served import ACCEPTED, VERIFIED, ask
from troupellm.training.drafters_tally import Tally


class _Counters(BaseHTTPRequestHandler):
    """A server whose answers add three verifications and five accepted drafts each; every third one does not end."""

    answered = 0
    speculates = True

    def do_GET(self) -> None:
        kind = type(self)
        lines = ["# TYPE other counter", "other 7.0"]
        if kind.speculates:
            lines += [
                f'{VERIFIED}_total{{engine="0"}} {3.0 * kind.answered}',
                f"{ACCEPTED}_total {5.0 * kind.answered}",
            ]
        self._answer("\n".join(lines) + "\n")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        kind = type(self)
        kind.answered += 1
        reason = "length" if kind.answered % 3 == 0 else "stop"
        self._answer(f'{{"choices": [{{"finish_reason": "{reason}"}}]}}')

    def log_message(self, *args: object) -> None:
        pass

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def address() -> Iterator[str]:
    _Counters.answered, _Counters.speculates = 0, True
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Counters)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_tally_is_the_growth_of_the_counters_over_the_answers(address: str) -> None:
    assert ask(address, ["a", "b", "c", "d"], 8) == Tally(verified=9, accepted=15)


def test_a_server_that_does_not_speculate_is_no_measure(address: str) -> None:
    _Counters.speculates = False
    with pytest.raises(LookupError, match="does not speculate"):
        ask(address, ["a"], 8)


def test_the_prompts_of_the_benchmark_are_those_of_this_table() -> None:
    assert {kind: [each.prompt for each in held] for kind, held in held_out(32).items()} == prompts(32)
