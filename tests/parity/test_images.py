"""Models that see images write the tokens that `transformers` writes, from the same placeholders and pixels."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import troupellm
from troupellm.protocol.errors import InvalidRequest
from troupellm.protocol.messages.input import ChatPrompt
from troupellm.protocol.messages.media import MediaSource
from troupellm.tests.support.checkpoints.vision_models import picture, reference, write_llava, write_smolvlm

pytestmark = pytest.mark.slow
TOKENS = 16
SETTINGS: dict[str, Any] = {"max_model_len": 512, "kv_cache_memory_bytes": 8 << 20}
WIDE, HIGH, SQUARE = picture(60, 24, 1), picture(20, 70, 2), picture(40, 40, 3)
IMAGE: dict[str, str] = {"type": "image"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


CASES: dict[str, tuple[list[Any], list[Image.Image]]] = {
    "one": ([text("look: "), IMAGE, text(" what?")], [WIDE]),
    "first": ([IMAGE, text("what?")], [HIGH]),
    "last": ([text("what?"), IMAGE], [SQUARE]),
    "adjacent": ([IMAGE, IMAGE, text("differ?")], [WIDE, HIGH]),
    "several": ([IMAGE, text("and "), IMAGE, text(" or "), IMAGE], [SQUARE, WIDE, SQUARE]),
    "none": ([text("no picture")], []),
}


def file_of(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def prompt_of(parts: list[Any], images: list[Image.Image]) -> ChatPrompt:
    sources = tuple(MediaSource(data=file_of(image), field=f"images[{n}]") for n, image in enumerate(images))
    return ChatPrompt(messages=[{"role": "user", "content": parts}], media=sources)


async def answer(engine: Any, prompt: ChatPrompt, **options: Any) -> Any:
    params = engine.sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, **options.pop("sampling", {}))
    return await engine.generate(prompt, params, **options)


@pytest.fixture(scope="module", params=[write_llava, write_smolvlm], ids=["llava", "smolvlm"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vision") / "model"
    write: Callable[[Path], None] = request.param
    write(made)
    return made


@pytest.mark.asyncio
async def test_prompts_and_answers_are_those_of_transformers(folder):
    """At once, then each again from the prefix cache."""
    async with troupellm.Engine(str(folder), **SETTINGS) as engine:
        for name, (parts, images) in CASES.items():
            messages = [{"role": "user", "content": parts}]
            prompt, tokens = reference(folder, messages, images, TOKENS)
            for _ in range(2):
                found = await answer(engine, prompt_of(parts, images))
                assert list(found.prompt_token_ids) == prompt, name
                assert list(found.choices[0].token_ids) == tokens, name
        both = await answer(engine, prompt_of(*CASES["one"]), sampling={"n": 2})
        prompt, tokens = reference(folder, [{"role": "user", "content": CASES["one"][0]}], CASES["one"][1], TOKENS)
        assert [list(choice.token_ids) for choice in both.choices] == [tokens, tokens]
        assert found.usage.image_tokens == 0
        assert both.usage.image_tokens > 0


@pytest.mark.asyncio
@pytest.mark.parametrize("step", [1, 7, 16])
async def test_a_prompt_in_pieces_of_any_length_has_the_same_answer(folder, step):
    settings = SETTINGS | {"max_num_batched_tokens": step, "max_num_seqs": 1}
    async with troupellm.Engine(str(folder), **settings) as engine:
        for name in ("several", "last"):
            parts, images = CASES[name]
            _, tokens = reference(folder, [{"role": "user", "content": parts}], images, TOKENS)
            found = await answer(engine, prompt_of(parts, images))
            assert list(found.choices[0].token_ids) == tokens


@pytest.mark.asyncio
async def test_requests_for_few_blocks_at_once_preempt_each_other_and_have_their_answers(folder):
    """Two users send the same text and other images, in a cache and a room for embeddings that do not hold them all."""
    parts, settings = CASES["one"][0], SETTINGS | {"kv_cache_memory_bytes": 1 << 19, "encoder_cache_bytes": 64 * 256}
    images = [picture(40 + n, 40, n) for n in range(6)]
    wanted = [reference(folder, [{"role": "user", "content": parts}], [image], TOKENS)[1] for image in images]
    async with troupellm.Engine(str(folder), **settings) as engine:
        prompts = [prompt_of(parts, [image]) for image in images]
        params = engine.sampling(max_tokens=TOKENS, temperature=0.0, ignore_eos=True)
        async for index, found in engine.map(prompts, params):
            assert list(found.choices[0].token_ids) == wanted[index]


@pytest.mark.asyncio
async def test_a_media_token_that_the_user_types_is_plain_text(folder):
    """It takes no image, and the image that is there takes its own place."""
    parts, images = CASES["one"]
    typed = [text("a <image> and <im"), text("age> too "), *parts]
    async with troupellm.Engine(str(folder), **SETTINGS) as engine:
        found = await answer(engine, prompt_of(typed, images))
        plain = await answer(engine, prompt_of(parts, images))
        assert found.usage.image_tokens == plain.usage.image_tokens
        shown = engine.tokenizer.decode(found.prompt_token_ids, skip_special_tokens=True)
        assert "a <image> and <image> too" in shown


@pytest.mark.asyncio
async def test_a_bad_image_fails_its_request_alone(folder):
    async with troupellm.Engine(str(folder), **SETTINGS, limit_mm_per_prompt={"image": 2}) as engine:
        good = prompt_of(*CASES["one"])
        for data in (b"", b"not an image", file_of(WIDE)[:60]):
            bad = ChatPrompt(messages=good.messages, media=(MediaSource(data=data, field="messages[0].content[1]"),))
            with pytest.raises(InvalidRequest, match=r"messages\[0\]\.content\[1\]") as caught:
                await answer(engine, bad)
            assert caught.value.code == "invalid_image"
        with pytest.raises(InvalidRequest, match="at most 2 images"):
            await answer(engine, prompt_of(*CASES["several"]))
        url = MediaSource(url="http://127.0.0.1/a.png", field="messages[0].content[1]")
        with pytest.raises(InvalidRequest, match="allowed_media_domains"):
            await answer(engine, ChatPrompt(messages=good.messages, media=(url,)))
        assert len((await answer(engine, good)).choices[0].token_ids) == TOKENS
