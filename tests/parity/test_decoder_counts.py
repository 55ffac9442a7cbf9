"""Text decoders of `transformers`: served by a family of our own, by its code, or refused with a reason."""

import json
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from troupellm.models.families.registry import FAMILIES

TABLE = json.loads(Path(__file__).with_name("every_decoder.json").read_text())
REFUSED = {name for names in TABLE["refused"].values() for name in names}
NO_TEXT_DECODERS = {name for names in TABLE["no_text_decoders"].values() for name in names}
LEAST_SERVED = 108

pytestmark = pytest.mark.skipif(transformers.__version__ != TABLE["transformers"], reason="the table names a version")


def test_the_table_names_the_types_that_families_of_our_own_claim() -> None:
    first = {
        kind: name if isinstance(name, str) else name[0] for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    }
    assert TABLE["families"] == sorted(kind for kind, architecture in first.items() if architecture in FAMILIES)


def test_every_type_is_served_or_refused_with_a_reason() -> None:
    served = set(TABLE["served"])
    assert served.isdisjoint(REFUSED)
    assert served | REFUSED == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def test_no_text_decoder_that_was_served_is_lost() -> None:
    text = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - NO_TEXT_DECODERS
    served = text & (set(TABLE["served"]) | set(TABLE["families"]))
    assert (len(text), len(served)) == (154, LEAST_SERVED)
