"""Guides as values: what is refused before anybody compiles anything, and vLLM's names in Python."""

import msgspec
import pytest

from troupellm import GuideSpec, InvalidRequest, SamplingParams, StructuredOutputsParams
from troupellm.protocol.messages.worker import SamplingState
from troupellm.protocol.params.guide import MAX_SOURCE_BYTES, EarlyEnd, GuideProgram


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"kind": "frog", "source": "x"}, "structured_outputs"),
        ({"kind": "regex"}, "structured_outputs"),
        ({"kind": "regex", "source": 5}, "structured_outputs"),
        ({"kind": "regex", "source": "a" * (MAX_SOURCE_BYTES + 1)}, "structured_outputs"),
        ({"kind": "regex", "source": "é" * (MAX_SOURCE_BYTES // 2 + 1)}, "structured_outputs"),
        ({"kind": "regex", "source": "a\ud800"}, "structured_outputs"),
        ({"kind": "json_object", "after": "\udfff"}, "structured_outputs"),
        ({"kind": "json_object", "whitespace_pattern": "\ud800"}, "structured_outputs"),
        ({"kind": "regex", "source": "a", "backend": "frog"}, "x"),
        ({"kind": "regex", "source": "a", "backend": "outlines"}, "x"),
        ({"kind": "regex", "source": "a", "after": "a" * 65}, "x"),
    ],
)
def test_a_wrong_guide_is_refused_with_its_field(fields, param):
    field = {} if param == "structured_outputs" else {"field": param}
    with pytest.raises(InvalidRequest) as refused:
        GuideSpec(**fields, **field)
    assert refused.value.param == param


EARLY = EarlyEnd(token="<x>", starts=("<s>",), opens="<m>", ends=("<e>", "<x>"), recipient="to=")


def test_vllms_names_become_a_guide():
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    assert params.guide == GuideSpec(kind="regex", source="a+", field="structured_outputs.regex")
    assert params.structured_outputs is None
    assert msgspec.structs.replace(params, max_tokens=3).guide == params.guide
    with pytest.raises(InvalidRequest):
        SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"), guide=params.guide)
    with pytest.raises(InvalidRequest):
        SamplingParams(structured_outputs={"regex": "a+"})
    with pytest.raises(InvalidRequest):
        SamplingParams(guide="a+")


def test_a_guide_travels_with_its_row():
    state = SamplingState(
        guide=GuideProgram(backend="llguidance", text="start: /é/", after="</think>", early_end=EARLY)
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SamplingState) == state
    params = SamplingParams(guide=GuideSpec(kind="choice", source='["a"]', after="x", early_end=EARLY))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
