"""Images in plans: none of their positions is computed before the image is encoded, and the worker's room holds."""

import random
from types import SimpleNamespace

import pytest

from troupellm.actors.scheduler.encoders import MOST_PLAN_BYTES, Encoders
from troupellm.protocol.messages.media import MediaAbility, MediaItem, MediaSpan, MediaTensor
from troupellm.protocol.messages.scheduler import WorkerLost, WorkerRestarted
from troupellm.protocol.messages.worker import StepPlan
from troupellm.tests.support.scheduler.oracle import Harness, make_core, ready, submission

IMAGE = 7
"""Token of a placeholder."""


def item(name: str, vectors: int, num_bytes: int = 4) -> MediaItem:
    tensor = MediaTensor("pixel_values", "uint8", (num_bytes,), b"\0" * num_bytes)
    return MediaItem(digest=name.encode().ljust(32), num_vectors=vectors, grid=(1, 1), tensors=(tensor,))


def with_images(request: int, *parts: int | MediaItem, **fields: object) -> object:
    """A request whose prompt has so many tokens of text, or an image, in this order."""
    prompt: list[int] = []
    spans: list[MediaSpan] = []
    for part in parts:
        if isinstance(part, int):
            prompt += range(10, 10 + part)
            continue
        spans.append(MediaSpan(len(prompt), part.num_vectors, part.digest))
        prompt += [IMAGE] * part.num_vectors
    items = {part.digest: part for part in parts if not isinstance(part, int)}
    return submission(request, prompt, media=tuple(spans), items=tuple(items.values()), **fields)


def core(vectors: int = 32, step: int = 8, **config: object) -> object:
    ability = MediaAbility(kinds=("image",), cache_vectors=vectors, step_vectors=step)
    return make_core(ready(media=ability, num_blocks=config.pop("num_blocks", 64)), **config)


def followed(plans: list[StepPlan], room: int) -> list[int]:
    """Encoded vectors of each plan, after checks that the worker has what each plan reads, within its room."""
    held: dict[bytes, int] = {}
    spans: dict[int, tuple[MediaSpan, ...]] = {}
    encoded = []
    for plan in plans:
        for digest in plan.forgotten:
            del held[digest]
        for made in plan.encode:
            assert made.digest not in held, "an image that is there is encoded again"
            held[made.digest] = made.num_vectors
        assert sum(held.values()) <= room
        spans |= {new.row: new.media for new in plan.new_rows}
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            for span in spans[row]:
                if span.start < start + count and start < span.end:
                    assert span.digest in held, "a position of an image is computed before the image"
        encoded.append(sum(made.num_vectors for made in plan.encode))
    return encoded


def test_an_image_is_encoded_by_the_plan_that_computes_its_first_position():
    harness = Harness(core(max_num_batched_tokens=4))
    harness.submit(with_images(1, 6, item("a", 5), 2))
    harness.run()
    assert followed(harness.plans, 32)[:4] == [0, 5, 0, 0]


def test_a_span_waits_for_the_plan_whose_budget_has_room_for_its_image():
    harness = Harness(core(step=8, max_num_batched_tokens=64))
    harness.submit(with_images(1, 2, item("a", 5), 1, item("b", 5), 3))
    harness.run()
    assert followed(harness.plans, 32)[:2] == [5, 5]
    assert [plan.counts for plan in harness.plans[:2]] == [(8,), (8,)]


def test_an_image_larger_than_the_budget_of_a_step_is_encoded_alone():
    harness = Harness(core(step=8, max_num_batched_tokens=64))
    harness.submit(with_images(1, item("a", 3), item("b", 20), 2))
    harness.run()
    assert followed(harness.plans, 32)[:2] == [3, 20]


def test_images_of_many_bytes_are_spread_over_plans():
    harness = Harness(core(step=64, max_num_batched_tokens=64))
    half = MOST_PLAN_BYTES // 2 + 1
    harness.submit(with_images(1, item("a", 3, half), item("b", 3, half), 2))
    harness.run()
    assert followed(harness.plans, 32)[:2] == [3, 3]


def test_an_image_that_is_kept_is_not_encoded_again():
    harness = Harness(core())
    same = item("a", 5)
    for request in (1, 2):
        harness.submit(with_images(request, request, same, 2))
        harness.run()
    assert sum(followed(harness.plans, 32)) == 5


def test_two_images_of_equal_tokens_share_no_block_but_those_before_them():
    harness = Harness(core(step=64))
    for request, name in ((1, "a"), (2, "b"), (3, "a")):
        harness.submit(with_images(request, 8, item(name, 8), 9))
        harness.run()
    starts = {row: plan.starts[index] for plan in reversed(harness.plans) for index, row in enumerate(plan.rows)}
    assert (starts[100], starts[200], starts[300]) == (0, 8, 24)


def test_the_beginning_of_a_block_with_an_image_is_no_beginning_of_another_image():
    harness = Harness(core(step=64))
    for request, name in ((1, "a"), (2, "b")):
        harness.submit(with_images(request, 5, item(name, 3), 2))
        harness.run()
    starts = {row: plan.starts[index] for plan in reversed(harness.plans) for index, row in enumerate(plan.rows)}
    assert starts[200] == 4


def test_a_new_worker_gets_the_images_again():
    scheduler = core(max_num_batched_tokens=4)
    harness = Harness(scheduler)
    harness.submit(with_images(1, 2, item("a", 9), 2))
    harness.step()
    before = len(harness.plans)
    harness.oracle.reset()
    scheduler.lose_worker(WorkerLost("killed", fault=False))
    scheduler.worker_restarted(WorkerRestarted(scheduler._ready).ready)
    harness.run()
    assert sum(followed(harness.plans[before:], 32)) == 9


def test_a_request_that_begins_with_an_image_has_its_blocks_before_a_plan_has_room_for_the_image():
    harness = Harness(core(vectors=8, step=2, max_num_batched_tokens=16))
    harness.submit(with_images(1, 3, item("a", 4)))
    harness.submit(with_images(2, item("b", 8)))
    harness.run()
    assert followed(harness.plans, 8)[:2] == [4, 8]
    assert [plan.rows for plan in harness.plans[:2]] == [(100,), (100, 200)]


@pytest.mark.parametrize("seed", range(8))
def test_requests_with_images_end_however_little_room_there_is(seed):
    """A mix of images that do not fit together, with blocks for few of the requests: preemptions, forks, hits."""
    draw = random.Random(seed)
    harness = Harness(core(vectors=12, step=6, num_blocks=14, max_num_batched_tokens=draw.choice((3, 8, 16))))
    images = [item(name, draw.randint(1, 12)) for name in "abcdef"]
    for request in range(1, 9):
        parts = [part for _ in range(draw.randint(1, 2)) for part in (draw.randint(0, 5), draw.choice(images))]
        harness.submit(with_images(request, *parts, 2, rows=draw.randint(1, 2), max_tokens=5))
    harness.run()
    followed(harness.plans, 12)
    harness.core.encoders.assert_invariants()


def test_an_image_of_a_plan_without_rows_leaves_its_room_to_others():
    """The row whose image it was may have given up its blocks: nothing would ever send the image and free its room."""
    encoders = Encoders(MediaAbility(kinds=("image",), cache_vectors=8, step_vectors=8))
    prompts = []
    for name in "ab":
        whole = item(name, 8)
        request = SimpleNamespace(media=(MediaSpan(2, 8, whole.digest),), items={whole.digest: whole})
        prompts.append(SimpleNamespace(request=request))
    encoders.begin()
    assert encoders.reach(prompts[0], 0, 10) == 10
    encoders.begin()
    assert encoders.reach(prompts[1], 0, 10) == 10
    encoders.assert_invariants()
    forgotten, encode = encoders.take()
    assert (forgotten, [made.digest[:1] for made in encode]) == ((), [b"b"])
