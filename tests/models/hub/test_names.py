import pytest

from troupellm.models.config.gguf_config import model_config
from troupellm.models.hub.gguf_choice import choose_gguf, label
from troupellm.models.hub.gguf_header import Header
from troupellm.models.hub.name import HubName, chosen_revision, parse_hub_name
from troupellm.protocol.errors import ModelLoadError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("gpt2", HubName("gpt2")),
        ("acme/tiny", HubName("acme/tiny")),
        ("acme/tiny-0.5B_v1.1", HubName("acme/tiny-0.5B_v1.1")),
        ("acme/tiny@v1", HubName("acme/tiny", "v1")),
        ("acme/tiny@feature/x", HubName("acme/tiny", "feature/x")),
        ("acme/tiny@refs/pr/3", HubName("acme/tiny", "refs/pr/3")),
        ("acme/tiny:Q4_K_M", HubName("acme/tiny", None, "Q4_K_M")),
        ("acme/tiny@v1:UD-Q4_K_XL", HubName("acme/tiny", "v1", "UD-Q4_K_XL")),
        ("acme/tiny/f.gguf", HubName("acme/tiny", None, None, "f.gguf")),
        ("acme/tiny/BF16/f-00001-of-00002.gguf", HubName("acme/tiny", None, None, "BF16/f-00001-of-00002.gguf")),
        ("hf://acme/tiny", HubName("acme/tiny")),
        ("hf://acme/tiny@v1", HubName("acme/tiny", "v1")),
        ("hf://acme/tiny@v1/sub/F.GGUF", HubName("acme/tiny", "v1", None, "sub/F.GGUF")),
        ("hf://acme/tiny@refs/pr/3/f.gguf", HubName("acme/tiny", "refs/pr/3", None, "f.gguf")),
        ("acme/tiny/config.json", None),
        ("a/b/c", None),
        ("acme/tiny@", None),
        ("acme/tiny:", None),
        ("f.gguf", None),
        ("acme/f.gguf", None),
        ("two words", None),
        ("a--b/c", None),
        ("acme/" + "x" * 100, None),
        ("acme/tiny@../x", None),
    ],
)
def test_names_of_the_hub(text, expected):
    assert parse_hub_name(text) == expected


def test_a_revision_is_given_once():
    name = HubName("acme/tiny", "v1")
    assert chosen_revision(name, None) == chosen_revision(HubName("acme/tiny"), "v1") == "v1"
    with pytest.raises(ModelLoadError, match=r"@v1 in the model's name and --revision v1"):
        chosen_revision(name, "v1")


PARTS = [f"UD-Q4_K_XL/tiny-UD-Q4_K_XL-0000{number}-of-00002.gguf" for number in (1, 2)]
NAMES = [
    "tiny-Q4_K_M.gguf", "tiny.Q8_0.gguf", "tiny-Q4_K_XL.gguf", "tiny-IQ4_NL.gguf", "tiny_f16.gguf", "tiny-BF16.gguf",
    "tiny-Q4_0_4_4.gguf", "mmproj-F16.gguf", "tiny.imatrix.gguf", "README.md", "config.json", *PARTS,
]  # fmt: skip


@pytest.mark.parametrize(
    ("tag", "expected"),
    [
        ("Q4_K_M", "tiny-Q4_K_M.gguf"),
        ("q8_0", "tiny.Q8_0.gguf"),
        ("Q4_K_XL", "tiny-Q4_K_XL.gguf"),
        ("UD-Q4_K_XL", PARTS[0]),
        ("ud-q4_k_xl", PARTS[0]),
        ("iq4_nl", "tiny-IQ4_NL.gguf"),
        ("F16", "tiny_f16.gguf"),
        ("BF16", "tiny-BF16.gguf"),
        ("Q4_0_4_4", "tiny-Q4_0_4_4.gguf"),
        (None, "tiny-Q4_K_M.gguf"),
    ],
)
def test_a_tag_is_a_whole_word_of_the_name(tag, expected):
    choice = choose_gguf(NAMES, "acme/tiny", tag=tag)
    assert choice.files == (tuple(PARTS) if expected == PARTS[0] else (expected,))
    assert choice.notes[0] == "mmproj-F16.gguf is beside the model: images are not read, text is"


@pytest.mark.parametrize("tag", ["Q4_K", "Q4", "K_M", "NL", "Q4_0", "Q2_K", "gguf", "4_K_M", "-", "mmproj"])
def test_a_tag_that_no_file_has_lists_those_that_there_are(tag):
    with pytest.raises(ModelLoadError, match=f"acme/tiny has no GGUF file with {tag} in its name") as caught:
        choose_gguf(NAMES, "acme/tiny", tag=tag)
    assert caught.value.hint is not None
    for known in ("Q4_K_M", "Q8_0", "UD-Q4_K_XL", "F16", "Q4_0_4_4"):
        assert known in caught.value.hint


def test_a_file_brings_all_parts_of_its_split():
    for part in PARTS:
        assert choose_gguf(NAMES, "acme/tiny", file=part).files == tuple(PARTS)
    with pytest.raises(ModelLoadError, match=r"UD-Q4_K_XL-00001-of-00002\.gguf is missing; it is one of 2 parts"):
        choose_gguf(PARTS[1:], "acme/tiny")


@pytest.mark.parametrize(
    ("names", "said", "hint"),
    [
        (["a-Q2_K.gguf", "a-Q8_0.gguf"], "acme/tiny has 2 GGUF files: Q2_K, Q8_0", "write acme/tiny:Q8_0"),
        (["a-Q2_K.gguf", "a-Q3_K_M.gguf"], "acme/tiny has 2 GGUF files: Q2_K, Q3_K_M", "write acme/tiny:Q2_K"),
        (["a-Q2_K.gguf", "b-Q2_K.gguf"], "2 GGUF files: a-Q2_K.gguf, b-Q2_K.gguf", "write acme/tiny/a-Q2_K.gguf"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "2 GGUF files", "write acme/tiny/a-Q4_K_M.gguf"),
        (["a.gguf", "b.gguf"], "acme/tiny has 2 GGUF files: a.gguf, b.gguf", "write acme/tiny/a.gguf"),
        (["a-UD-Q4_K_M.gguf", "a-Q2_K.gguf"], "2 GGUF files: Q2_K, UD-Q4_K_M", "write acme/tiny:Q2_K"),
    ],
)
def test_several_files_without_the_usual_one_are_listed(names, said, hint):
    with pytest.raises(ModelLoadError) as caught:
        choose_gguf(names, "acme/tiny")
    assert said in caught.value.message
    assert caught.value.hint == hint


def test_a_tag_of_two_models_asks_for_the_file():
    with pytest.raises(ModelLoadError, match="2 GGUF files with Q8_0 in their names: a-Q8_0.gguf, b-Q8_0.gguf"):
        choose_gguf(["a-Q8_0.gguf", "b-Q8_0.gguf"], "acme/tiny", tag="Q8_0")


def test_the_only_file_is_taken_without_a_note():
    assert choose_gguf(["a-Q2_K.gguf"], "acme/tiny") == (("a-Q2_K.gguf",), ())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"), ("tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf", "Q4_K_M"),
        ("smollm2-135m-instruct-q4_k_m.gguf", "Q4_K_M"), ("Model.i1-IQ3_XXS.gguf", "IQ3_XXS"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"), ("BF16/model-00001-of-00003.gguf", "BF16"), ("model.gguf", "model.gguf"),
    ],
)  # fmt: skip
def test_the_types_that_a_file_name_tells(name, expected):
    assert label(name) == expected


@pytest.mark.parametrize(
    ("metadata", "said"),
    [
        ({"general.type": "adapter"}, "f.gguf: general.type adapter is a LoRA adapter"),
        ({"general.type": "mmproj"}, "f.gguf: general.type mmproj is the part of a model that sees images"),
        ({"general.type": "imatrix"}, "f.gguf: general.type imatrix is an importance matrix"),
        ({"general.type": ["riddle"]}, "is no language model"),
        ({"general.type": "model", "general.architecture": "clip"}, "f.gguf: general.architecture clip is the part"),
    ],
)
def test_a_file_that_is_no_language_model_says_what_it_is(metadata, said):
    header = Header("f.gguf", {"general.architecture": "llama"} | metadata, {})
    with pytest.raises(ModelLoadError) as caught:
        model_config(header)
    assert said in caught.value.message
