"""Prepared images: one object for all requests that hold it, counted for as long as it lives."""

import gc

from troupellm.actors.media.item_cache import ItemCache
from troupellm.protocol.messages.media import MediaItem, MediaTensor


def item(name: str, size: int = 100) -> MediaItem:
    tensor = MediaTensor("pixel_values", "uint8", (size,), bytes(size))
    return MediaItem(digest=name.encode(), num_vectors=1, grid=(1, 1), tensors=(tensor,))


def test_an_image_that_is_kept_is_found_by_its_file():
    cache = ItemCache(1000)
    assert cache.find(b"file") is None
    made = cache.add(b"file", item("a"))
    assert cache.find(b"file") is made
    assert (len(cache), cache.kept_bytes, cache.alive_bytes, cache.hits) == (1, 100, 100, 1)


def test_two_files_of_the_same_pixels_are_one_image():
    cache = ItemCache(1000)
    assert cache.add(b"png", item("a")) is cache.add(b"webp", item("a"))
    assert cache.alive_bytes == 100


def test_the_least_used_images_go_and_those_that_a_request_holds_stay_counted():
    cache = ItemCache(250)
    held = cache.add(b"0", item("0"))
    for number in range(1, 5):
        cache.add(str(number).encode(), item(str(number)))
    gc.collect()
    assert (len(cache), cache.kept_bytes, cache.alive_bytes) == (2, 200, 300)
    assert cache.find(b"0") is None
    assert held.digest == b"0"
    del held
    gc.collect()
    assert cache.alive_bytes == 200


def test_an_image_larger_than_the_cache_is_not_kept():
    cache = ItemCache(50)
    cache.add(b"a", item("a"))
    gc.collect()
    assert (len(cache), cache.alive_bytes) == (0, 0)
