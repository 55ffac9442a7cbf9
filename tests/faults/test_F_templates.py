"""Row F5 of the fault table: chat templates that are wrong, or that want everything."""

import pytest

from troupellm.actors.engine.engine import Engine
from troupellm.protocol.errors import ModelLoadError
from troupellm.tests.support.servers.canary import under_many as under_attack

pytestmark = pytest.mark.anyio


WRONG = {
    "syntax": "{% for %}",
    "endless": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "huge": "{{ 'x' * 1000000000000 }}",
    "unknown filter": "{{ messages | nonsense }}",
}
HOG = (
    "{% for m in messages %}{{ m.content }}"
    "{% if 'hog' in m.content %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endif %}"
    "{% if 'big' in m.content %}{{ 'x' * 1000000000000 }}{% endif %}"
    "{% if 'undefined' in m.content %}{{ nothing.at.all }}{% endif %}"
    "{% if 'escape' in m.content %}{{ messages.__class__.__mro__[1].__subclasses__() }}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
async def test_F5_a_model_with_such_a_template_is_not_served(tiny_engine, text):
    with pytest.raises(ModelLoadError, match="chat template"):
        async with tiny_engine(chat_template=text + "\n"):
            raise AssertionError("it was served")


@pytest.mark.parametrize("stream", [False, pytest.param(True, marks=pytest.mark.slow)])
async def test_F5_a_template_that_hogs_over_some_messages_harms_nobody_else(tiny_engine, stream):
    async with tiny_engine(chat_template=HOG) as engine, under_attack(engine) as attacked:
        assert isinstance(engine, Engine)
        for word in ("hog", "big", "undefined", "escape"):
            body = {"model": "tiny", "messages": [{"role": "user", "content": word}], "max_tokens": 2}
            answer = await attacked.client.post("/v1/chat/completions", json=body | {"stream": stream})
            assert answer.status_code == 400, word
            error = answer.json()["error"]
            assert error["param"] == "messages"
            assert "subclasses" not in error["message"]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "fine"}], "max_tokens": 2}
        assert (await attacked.client.post("/v1/chat/completions", json=body)).status_code == 200
        assert max(attacked.lags) < 3.0
