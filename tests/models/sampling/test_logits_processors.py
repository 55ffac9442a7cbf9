import msgspec
import pytest
import torch

from troupellm.models.sampling.logits_processors import GROUP, describe, load_processors
from troupellm.models.sampling.sampler import Sampler
from troupellm.protocol.errors import REFUSED, ModelLoadError
from troupellm.protocol.messages.worker import RowError, SamplingState
from troupellm.tests.support.workers.plug_ins import MODULE as PLUG_IN_MODULE, Broken, OnlyToken

VOCAB, CPU = 40, torch.device("cpu")
NAMED = (f"only={PLUG_IN_MODULE}:OnlyToken", f"broken={PLUG_IN_MODULE}:Broken")


def make_sampler(*asked):
    sampler = Sampler(VOCAB, CPU, load_processors(NAMED, VOCAB, CPU))
    for row, processors in enumerate(asked):
        given = tuple((name, msgspec.json.encode(arguments)) for name, arguments in processors.items())
        sampler.add_row(row, SamplingState(temperature=0.0, processors=given), [1, 2], 2)
    return sampler


def sample(sampler, rows):
    logits = torch.arange(VOCAB, dtype=torch.float32).repeat(rows, 1)
    return sampler.sample(logits, range(rows), [3] * rows, [torch.tensor([1, 2, 3])] * rows)


def test_only_rows_that_ask_are_changed_each_with_its_own_arguments():
    found = sample(make_sampler({}, {"only": {"token": 4}}, {}, {"only": {"token": 9}}), 4)
    assert found.tokens.tolist() == [39, 4, 39, 9]
    assert found.errors == []


def test_a_plug_in_sees_options_tokens_and_where_the_prompt_ends():
    sampler = make_sampler({"only": {"token": 4, "after": 2}})
    assert sample(sampler, 1).tokens.tolist() == [39]
    logits = torch.zeros(1, VOCAB)
    assert sampler.sample(logits, [0], [4], [torch.tensor([1, 2, 3, 3])]).tokens.tolist() == [4]


def test_wrong_arguments_refuse_that_row_alone():
    found = sample(make_sampler({}, {"only": {"token": "x"}}, {"only": {"token": 5}}), 3)
    assert found.errors == [RowError(1, "logits_processors: only: token must be a token id", REFUSED)]
    assert found.tokens.tolist() == [39, -1, 5]


def test_a_plug_in_that_fails_costs_the_rows_it_fails_over():
    found = sample(make_sampler({"broken": {"how": "raise"}}, {"broken": {}}, {}, {"broken": {"how": "shape"}}), 4)
    assert [(error.row, error.message) for error in found.errors] == [
        (0, "the logits processor broken failed"),
        (3, "the logits processor broken failed"),
    ]
    assert found.tokens.tolist() == [-1, 39, 39, -1]


@pytest.mark.parametrize("how", ["nan", "all"])
def test_scores_that_nothing_can_be_drawn_from_fail_the_row(how):
    found = sample(make_sampler({"broken": {"how": how}}, {}), 2)
    assert [error.row for error in found.errors] == [0]
    assert found.tokens.tolist() == [-1, 39]


def test_plug_ins_are_listed_with_the_arguments_that_turn_them_on():
    told = {info.name: info.arguments for info in describe(load_processors(NAMED, VOCAB, CPU))}
    assert told == {"only": ("token",), "broken": ()}
    assert set(load_processors((f"{PLUG_IN_MODULE}:OnlyToken",), VOCAB, CPU)) == {"OnlyToken"}


def test_a_default_is_told_of_with_its_arguments():
    loaded = load_processors(NAMED, VOCAB, CPU)
    told = {info.name: info.default for info in describe(loaded, ['only={"token": 4}', "broken"])}
    assert told == {"only": b'{"token":4}', "broken": b"{}"}
    assert [info.default for info in describe(loaded)] == [None, None]


@pytest.mark.parametrize("text", ["missing", "only", "only=4", "only=[]", 'only={"token": -1}', "only={"])
def test_a_default_that_cannot_hold_ends_the_start_by_name(text):
    with pytest.raises(ModelLoadError, match=f"default_logits_processors: .*{text.partition('=')[0]}"):
        describe(load_processors(NAMED, VOCAB, CPU), [text])


def test_installed_ones_are_found_by_their_entry_point(tmp_path, monkeypatch):
    folder = tmp_path / "somebody-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[{GROUP}]\ninstalled = {PLUG_IN_MODULE}:OnlyToken\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert isinstance(load_processors((), VOCAB, CPU)["installed"], OnlyToken)


@pytest.mark.parametrize(
    "path",
    ["nowhere:Class", f"{PLUG_IN_MODULE}:Missing", PLUG_IN_MODULE, "builtins:dict", f"{PLUG_IN_MODULE}:NoPlugIn"],
)
def test_what_cannot_be_loaded_is_named(path):
    with pytest.raises(ModelLoadError, match="logits processor mine"):
        load_processors((f"mine={path}",), VOCAB, CPU)


def test_both_are_what_they_are_named():
    loaded = load_processors(NAMED, VOCAB, CPU)
    assert isinstance(loaded["broken"], Broken)
