"""A real file served by a fresh process, and the same file in transformers, whose weights are plain float32."""

from dataclasses import dataclass
from pathlib import Path

import httpx
import torch
import transformers
from torch import Tensor

from troupellm.tests.support.servers.processes import serving_process

LONGEST_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Answer:
    """Greedy tokens behind the ids of a prompt."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True, slots=True)
class Served:
    """Everything that the tests ask of one server.

    logprobs: of each token of the text but the first.
    """

    answers: list[Answer]
    text: list[int]
    logprobs: list[float]
    ids: list[list[int]]


async def serve(
    path: Path, prompts: tuple[str, ...], *flags: str, tokens: int, text: str, texts: tuple[str, ...]
) -> Served:
    """Answers of `troupellm serve FILE`, all prompts in one batch."""
    async with serving_process(path, *flags, small=False) as server:
        await server.ready(LONGEST_SECONDS)
        async with server.client(timeout=LONGEST_SECONDS) as client:
            answers = await _complete(client, path.stem, prompt=list(prompts), max_tokens=tokens, ignore_eos=True)
            (read,) = await _complete(client, path.stem, prompt=text, max_tokens=1, prompt_logprobs=0)
            ids = [await _tokenize(client, each) for each in texts]
    pairs = zip(read["prompt_token_ids"][1:], read["prompt_logprobs"][1:], strict=True)
    return Served(
        [Answer(choice["prompt_token_ids"], choice["token_ids"]) for choice in answers],
        read["prompt_token_ids"],
        [entries[str(token)]["logprob"] for token, entries in pairs],
        ids,
    )


async def _complete(client: httpx.AsyncClient, model: str, **body: object) -> list[dict]:
    asked = {"model": model, "temperature": 0.0, "return_token_ids": True, **body}
    response = await client.post("/v1/completions", json=asked)
    assert response.status_code == 200, response.text
    return response.json()["choices"]


async def _tokenize(client: httpx.AsyncClient, text: str) -> list[int]:
    response = await client.post("/tokenize", json={"prompt": text, "add_special_tokens": False})
    assert response.status_code == 200, response.text
    return response.json()["tokens"]


class Reference:
    """transformers' model of a GGUF file, dequantized by transformers with the package gguf."""

    def __init__(self, path: Path) -> None:
        kind = transformers.AutoModelForCausalLM
        self._model = kind.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()
        assert {parameter.dtype for parameter in self._model.parameters()} == {torch.float32}

    @torch.inference_mode()
    def behind(self, answer: Answer) -> Tensor:
        """[tokens]: the logit of each token below the best one of its place; 0 where it is the best one."""
        ids = torch.tensor([[*answer.prompt, *answer.tokens]])
        logits = self._model(ids, logits_to_keep=len(answer.tokens) + 1).logits[0, :-1]
        return logits.max(dim=-1).values - logits.gather(1, ids[0, len(answer.prompt) :, None])[:, 0]

    @torch.inference_mode()
    def logprobs(self, ids: list[int]) -> Tensor:
        """[ids - 1]"""
        logits = self._model(torch.tensor([ids])).logits[0, :-1]
        return logits.log_softmax(dim=-1).gather(1, torch.tensor(ids)[1:, None])[:, 0]


def check_greedy(reference: Reference, answers: list[Answer], *, tie: float = 1e-3) -> None:
    """Each token is the reference's best one, but for 0.5 % (or one) that are less than `tie` below its logit."""
    behind = torch.cat([reference.behind(answer) for answer in answers])
    assert behind.max() < tie, f"behind the best token by {sorted(behind.tolist())[-5:]}"
    assert (behind > 0).sum() <= max(1, 0.005 * len(behind))
