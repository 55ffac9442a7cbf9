"""Row E6 of the fault table, for optional columns: log-probabilities that cannot be read."""

import pytest
from canary import under_attack
from meddler import MARKER, WorkerHosts, changed

from troupellm.protocol.messages.worker import RowLogprobs, StepResult

pytestmark = pytest.mark.anyio

ATTACK = {
    "model": "tiny", "prompt": MARKER, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "logprobs": 2,
    "prompt_logprobs": 1, "return_token_ids": True,
}  # fmt: skip


def _garbled(entry: RowLogprobs, kind: str, vocabulary: int) -> RowLogprobs:
    match kind:
        case "no width":
            return changed(entry, width=0)
        case "wrong width":
            return changed(entry, width=entry.width + 1)
        case "too few ids":
            return changed(entry, token_ids=entry.token_ids[:-4])
        case "half a rank":
            return changed(entry, ranks=entry.ranks[:-2])
        case "ranks of nobody":
            return changed(entry, other_ranks=bytes(2))
        case "id out of range":
            return changed(entry, token_ids=entry.token_ids[:-4] + vocabulary.to_bytes(4, "little"))
    raise AssertionError(kind)


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ("logprobs", "no width"),
        ("prompt_logprobs", "too few ids"),
        *(
            pytest.param(column, kind, marks=pytest.mark.slow)
            for column, kind in (
                ("prompt_logprobs", "no width"),
                ("logprobs", "wrong width"),
                ("logprobs", "half a rank"),
                ("logprobs", "ranks of nobody"),
                ("logprobs", "id out of range"),
            )
        ),
    ],
)
async def test_E6_log_probabilities_that_nobody_can_read_cost_nobody_a_request(tiny_engine, column, kind):
    hosts = WorkerHosts()
    async with tiny_engine(worker=hosts) as engine, under_attack(engine, canary_tokens=60) as attacked:
        vocabulary, left = engine.ready.vocab_width, [2]

        def garble(result: StepResult) -> StepResult:
            entries = getattr(result, column)
            if not left[0] or hosts.worker.marked.isdisjoint(entry.row for entry in entries):
                return result
            left[0] -= 1
            return changed(result, **{column: tuple(_garbled(entry, kind, vocabulary) for entry in entries)})

        right = (await attacked.client.post("/v1/completions", json=ATTACK)).json()["choices"][0]
        hosts.worker.on_result = garble
        answer = await attacked.client.post("/v1/completions", json=ATTACK)
        if answer.status_code == 500:  # twice in a row, and it was alone both times
            assert answer.json()["error"]["code"] == "engine_request_failed"
            answer = await attacked.client.post("/v1/completions", json=ATTACK)
        assert answer.status_code == 200, answer.text
        again = answer.json()["choices"][0]
        assert again["token_ids"] == right["token_ids"]
        assert len(again["logprobs"]["token_logprobs"]) == len(right["token_ids"]) == 8
        assert len(again["prompt_logprobs"]) == len(MARKER)
        assert engine.snapshot().scheduler.worker_losses >= 1
