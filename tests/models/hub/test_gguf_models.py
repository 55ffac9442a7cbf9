import pytest

REPO = "acme/tiny-GGUF"
PARTS = [f"BF16/tiny-BF16-0000{number}-of-00003.gguf" for number in (1, 2, 3)]
FILES = {name: name.encode() * 100 for name in ("tiny-Q4_K_M.gguf", "tiny-Q8_0.gguf", "mmproj-F16.gguf", *PARTS)}
OTHERS = {"config.json": b"{}", "imatrix_unsloth.dat": b"x", "params": b"{}", "template": b"x", "README.md": b"x"}


@pytest.fixture
def ggufs(hub):
    hub.add(REPO, FILES | OTHERS)
    hub.add(REPO, {"tiny-Q8_0.gguf": b"other"}, "v1")
    return hub


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (REPO, ["tiny-Q4_K_M.gguf"]),
        (f"{REPO}:q8_0", ["tiny-Q8_0.gguf"]),
        (f"{REPO}:BF16", PARTS),
        (f"{REPO}/tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        (f"hf://{REPO}/{PARTS[1]}", PARTS),
        (f"hf://{REPO}@v1/tiny-Q8_0.gguf", ["tiny-Q8_0.gguf"]),
        (f"{REPO}@v1", ["tiny-Q8_0.gguf"]),
    ],
)
def test_only_the_chosen_file_is_fetched_with_all_of_its_parts(ggufs, resolve, name, expected):
    outcome = resolve(name)
    assert str(outcome.path).endswith(expected[0])
    assert ggufs.names() == expected
    assert outcome.folder.read_bytes() == (b"other" if "v1" in name else FILES[expected[0]])
    again = resolve(name, env={"HF_HUB_OFFLINE": "1"})
    assert again.path == outcome.path


def test_a_tokenizer_that_was_published_beside_the_file_is_fetched_before_it(hub, resolve):
    read = {"tokenizer.json": b"{}", "tokenizer_config.json": b"{ }", "config.json": b"{  }"}
    other = {"chat_template.jinja": b"x", "generation_config.json": b"{   }", "vocab.json": b"y"}
    hub.add(REPO, FILES | OTHERS | read | other)
    resolve(REPO)
    assert [name for name, _ in hub.downloads()] == [*sorted(read), "tiny-Q4_K_M.gguf"]
    hub.behave()
    resolve(f"{REPO}:BF16")
    assert hub.names() == PARTS  # in a folder without a tokenizer


def test_a_tokenizer_beside_is_left_where_another_one_is_named(hub, resolve):
    hub.add(REPO, FILES | {"tokenizer.json": b"{}"})
    resolve(REPO, tokenizer="elsewhere")
    assert hub.names() == ["tiny-Q4_K_M.gguf"]


def test_the_default_and_a_projector_beside_it_are_noted(ggufs, resolve):
    notes = resolve(REPO).notes
    assert "tiny-Q4_K_M.gguf is taken" in notes
    assert "mmproj-F16.gguf is beside the model" in notes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (f"{REPO}:Q2_K", "has no GGUF file with Q2_K in its name; there are BF16, Q4_K_M, Q8_0"),
        (f"{REPO}/nothing.gguf", f"has no file nothing.gguf; there are {PARTS[0]}, tiny-Q4_K_M.gguf, tiny-Q8_0.gguf"),
        (f"{REPO}/mmproj-F16.gguf", "mmproj-F16.gguf is a projector of images (mmproj), no language model"),
    ],
)
def test_a_file_that_is_not_there_lists_those_that_there_are(ggufs, resolve, name, said):
    outcome = resolve(name)
    assert said in f"{outcome.error}; {outcome.hint}"
    assert ggufs.names() == []


def test_a_part_that_is_missing_in_the_cache_is_named(ggufs, resolve):
    (resolve(f"{REPO}:BF16").folder.parent / "tiny-BF16-00002-of-00003.gguf").unlink()
    assert f"{PARTS[1]} is missing; it is one of 3 parts" in resolve(f"{REPO}:BF16", env={"HF_HUB_OFFLINE": "1"}).error


def test_safetensors_are_taken_where_the_repository_has_both(hub, resolve):
    files = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"x", "tiny-Q8_0.gguf": b"y"}
    hub.add("acme/both", files)
    assert "tiny-Q8_0.gguf" not in resolve("acme/both").names
    assert resolve("acme/both:Q8_0").folder.name == "tiny-Q8_0.gguf"
