"""The lines that `serve` prints for a newcomer once it is ready."""

import errno
import io
from types import SimpleNamespace
from typing import Any, Self

import pytest

from troupellm.protocol.config.engine import ServerConfig
from troupellm.server.cli.main import main
from troupellm.server.cli.serve import _announce

pytestmark = pytest.mark.anyio


class Answer:
    """A stream with one piece."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...

    async def __aiter__(self) -> Any:
        yield SimpleNamespace(text="68.")


def engine() -> Any:
    return SimpleNamespace(
        chat_template=SimpleNamespace(available=True), model_names=("m",), chat=lambda *_, **__: Answer()
    )


class Full(io.StringIO):
    """Standard output on a full disk, or into a pipe without a reader."""

    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


async def test_serving_goes_on_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    output = Full()
    monkeypatch.setattr("sys.stdout", output)
    await _announce(ServerConfig(), engine(), "http://127.0.0.1:1")
    assert "Troupe serves m at http://127.0.0.1:1" in output.getvalue()


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (ServerConfig(), False),
        (ServerConfig(api_key=("k",)), True),
        (ServerConfig(api_key_file="keys.toml"), True),
    ],
)
async def test_the_example_has_a_key_where_one_is_needed(
    config: ServerConfig, wanted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    await _announce(config, engine(), "http://127.0.0.1:1")
    out = capsys.readouterr().out
    assert ("authorization: Bearer <key>" in out) is wanted
    assert ('api_key="<key>"' in out) is wanted


def test_a_socket_that_cannot_be_bound_is_told_without_ports(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "missing" / "s"
    assert main(["serve", "--uds", str(place)]) == 1
    assert capsys.readouterr().err == f"troupellm: cannot listen at {place}: No such file or directory\n"
