"""The B rows of the fault table as data: which values are wrong in which fields, on all routes that have them.

A value of a wrong *type* is refused wherever the field is known, one out of *range* wherever the field is used. Odd
values may be served or refused, and do no harm either way.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from troupellm.tests.support.checkpoints.tiny_model import LOGITS_WIDTH

HUGE = 10**9
LONG = "x" * 2**20
NESTED: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}}
for _ in range(40):
    NESTED = {"type": "array", "items": NESTED}


class Values(msgspec.Struct, frozen=True, kw_only=True):
    """The values that are sent in each of the fields."""

    fields: tuple[str, ...]
    types: tuple[Any, ...] = ()
    ranges: tuple[Any, ...] = ()
    odd: tuple[Any, ...] = ()


_COUNTS = ("n", "best_of")
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
_PARTS = ("image_url", "input_audio", "video_url", "image_embeds", "prompt_embeds", "file")
_IDS = ("allowed_token_ids", "stop_token_ids", "logprob_token_ids")
_LABELS = ("user", "safety_identifier", "prompt_cache_key")
_NOT_HERE = (
    "prompt_embeds", "kv_transfer_params", "ec_transfer_params", "media_io_kwargs", "mm_processor_kwargs",
    "prompt_logprob_token_ids", "functions", "function_call", "audio", "web_search_options", "suffix",
)  # fmt: skip
_PROMPTS = ("prompt", "input", "text_1", "text_2", "queries", "documents", "query", "tokens")

ROWS: dict[str, tuple[Values, ...]] = {
    "B1": (Values(fields=_COUNTS, types=(1.5, "2", True, [], {}), ranges=(0, -1, 65, HUGE, 2**63)),),
    "B2": (
        Values(fields=_LIMITS, types=(1.5, "10", True, [], {}), ranges=(0, -1), odd=(2**53 + 1, None)),
        Values(fields=("min_tokens",), types=(1.5, "10", True, []), ranges=(-1, 2**53 + 1)),
        Values(fields=("seed",), types=(1.5, "10", True, []), ranges=(2**64,), odd=(-1, 0, 2**53 + 1)),
        Values(fields=("top_k",), types=(1.5, "10", True, []), ranges=(-2, 2**53 + 1), odd=(-1, 0)),
        Values(fields=("priority",), types=(1.5, "10", True, []), ranges=(2**53 + 1,), odd=(-1, 0)),
        Values(fields=("stream_interval", "truncate_prompt_tokens"), types=(1.5, "1", True), ranges=(0, -2, 2**40)),
        Values(fields=("thinking_token_budget",), types=(1.5, "1", True), ranges=(-2, 2**40), odd=(-1, 0)),
        Values(fields=("queue_timeout",), types=("1", True, []), ranges=(0, -1), odd=(1e308,)),
        Values(fields=("top_n", "dimensions"), types=(1.5, "1", True, []), ranges=(-1,), odd=(HUGE,)),
        Values(
            fields=("completion_window",),
            types=(5, [], None),
            ranges=("", "24", "0h", "-1h", "1w", "24h\n", "24H", "\u0661h", "8d", "9999d", LONG),
        ),
        Values(
            fields=("output_expires_after",),
            types=(5, "x", []),
            ranges=(
                {},
                {"anchor": "created_at"},
                {"anchor": "created_at", "seconds": 5},
                {"seconds": 7_200},
                {"anchor": "now", "seconds": 7_200},
                {"anchor": "created_at", "seconds": 2**63},
            ),
        ),
        Values(fields=("all",), types=(1, "yes", []), ranges=(True,)),  # beside names: which is meant?
    ),
    "B3": (Values(fields=_NUMBERS, types=("1", True, [], "NaN"), ranges=(-1e308, 1e308, -2.5), odd=(-0.0, 1e-320)),),
    "B4": (
        Values(fields=("top_logprobs", "prompt_logprobs"), types=(1.5, "1", True), ranges=(-2, 21, HUGE)),
        Values(fields=("logprobs",), types=(1.5, "1", []), odd=(True, False, 20)),
    ),
    "B5": (
        Values(fields=_IDS, types=([1.5], ["1"], [True], "1", 5), ranges=([LOGITS_WIDTH], [-1], [2**31], [0] * 70_000)),
        Values(
            fields=("logit_bias",),
            types=({"x": 1}, {"1": "1"}, {"1": True}, [1], "1"),
            ranges=({str(LOGITS_WIDTH): 1}, {"1": 101}, {str(number): 1 for number in range(2_000)}),
        ),
        Values(fields=("bad_words",), types=([1], 5), ranges=([""], ["x"] * 129, ["x" * 513])),
    ),
    "B6": (
        Values(fields=_PROMPTS, types=(5, True, {"text": "x"}, [None], [True], [1.5], [[True]])),
        Values(fields=("prompt", "input"), types=([1, "x"], [[1], "x"]), odd=("", [], [[]], "\x00", LONG)),
        Values(fields=("prompt", "tokens"), ranges=([LOGITS_WIDTH], [-1], [2**70])),
        Values(fields=("documents", "queries", "text_2"), odd=([], [""], ["x"] * 3_000, LONG)),
    ),
    "B7": (
        Values(fields=("stop",), types=(5, True, {}, [1], [None]), ranges=("", [""], ["x"] * 17, "x" * 513, LONG)),
        Values(fields=("stop_sequences",), types=("x", 5, True, {}, [1], [None]), odd=([""], ["x"] * 10_000, [LONG])),
    ),
    "B8": (
        Values(
            fields=("messages",),
            types=("x", 5, [5], [{"content": "x"}], [{"role": None, "content": "x"}]),
            ranges=(
                [],
                [{"role": "wizard", "content": "x"}],
                [{"role": "user", "content": {"a": 1}}],
                [{"role": "user", "content": [5]}],
                [{"role": "user"}],
            ),
            odd=(
                [{"role": "user", "content": ""}],
                [{"role": "assistant", "content": "So"}],
                [{"role": "user", "content": "x"}] * 10_001,
                [{"role": "tool", "content": "x", "tool_call_id": "c"}],
            ),
        ),
    ),
    "B9": (
        Values(fields=("chat_template",), types=(5, []), ranges=("{{ 1 }}", LONG)),
        Values(
            fields=("chat_template_kwargs",),
            types=(5, [], "x"),
            ranges=(
                {"tokenize": True},
                {"chat_template": "x"},
                {"messages": []},
                {"__class__": 1},
                {"_private": 1},
                {"add_generation_prompt": False},
                {"a": [1]},
                {"a": LONG},
                {f"a{number}": 1 for number in range(99)},
                {"not a name": 1},
                {"bos_token": "x"},
            ),
            odd=({"enable_thinking": False}, {}),
        ),
    ),
    "B10": (
        Values(
            fields=("response_format",),
            types=(5, "json"),
            ranges=(
                {"type": "xml"},
                {"type": "json_schema"},
                {"type": "json_schema", "json_schema": {"schema": 5}},
                {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "http://127.0.0.1:9/x"}}},
            ),
            odd=({"type": "json_schema", "json_schema": {"name": "x", "schema": NESTED}}, {"type": "json_object"}),
        ),
        Values(
            fields=("structured_outputs",),
            ranges=(
                {"regex": "(("},
                {"json": {"type": "nothing"}},
                {"choice": []},
                {"regex": "a", "choice": ["b"]},
                {"grammar": "start: ("},
            ),
            odd=(
                {"regex": "(a+)+$"},
                {"regex": "a{0,1000000000}"},
                {"choice": ["x"] * 10_000},
                {"choice": [f"x{number}" for number in range(5_000)]},
            ),
        ),
    ),
    "B11": (
        Values(
            fields=("tools",),
            types=(5, "x", [5]),
            ranges=([{"type": "function"}], [{"type": "function", "function": {"name": "a b\x00", "parameters": 5}}]),
            odd=([{"type": "function", "function": {"name": f"f{number}"}} for number in range(1_000)], []),
        ),
        Values(fields=("tool_choice",), types=(5, []), odd=("sometimes", "required", {"type": "function"})),
    ),
    "B12": (
        Values(fields=("model",), odd=("nobody", "../../x", LONG, "a\x00b", "/etc/passwd", "")),
        Values(fields=("input_file_id",), types=(5, [], None), ranges=("", "file-0", "../../x", "a\x00b", LONG)),
        Values(
            fields=("endpoint",),
            types=(5, [], None),
            ranges=("", "/v1/nowhere", "/v1/batches", "/pause", "v1/completions", "/v1/../v1/completions", LONG),
        ),
        Values(fields=("request_ids",), types=("x", 5, {}, [5], [None]), ranges=([], ["x" * 257], ["x"] * 1_025)),
        Values(fields=("level",), types=(5, [], None), ranges=("", "loud", "INFO", "critical", LONG)),
    ),
    "B13": (
        Values(fields=("cache_salt",), types=(5, []), ranges=("", "x" * 129, LONG), odd=("ü" * 64, "../..")),
        Values(fields=_LABELS, types=(5, []), ranges=("x" * 513, LONG), odd=("", "\u202e\x00ü", "../../etc")),
        Values(fields=("session_id",), types=(5, []), odd=("", "\u202e\x00ü", "../../etc", "x" * 513, LONG)),
        Values(fields=("metadata",), types=(5, [], "x"), odd=({"a": 5}, {"user_id": LONG}, {"b": "ü\x00"})),
    ),
    "B14": (
        Values(
            fields=("messages",),
            ranges=(
                *([{"role": "user", "content": [{"type": kind, kind: {"url": "data:,"}}]}] for kind in _PARTS),
                [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://[::1]:9/"}}] * 99}],
            ),
        ),
    ),
    "B15": (
        Values(fields=_NOT_HERE, ranges=({"a": 1}, ["x"], "AAAA", 7)),
        Values(
            fields=("logits_processors",),
            types=(5, "os.system"),
            ranges=(["nobody"], [{"qualname": "os.system"}], [{"name": "x", "code": "1"}], {"os.system": {}}, [{}]),
        ),
        Values(fields=("vllm_xargs",), types=(5, [1]), ranges=({"nobody": 1}, {"x": LONG})),
        Values(fields=("__class__", "__proto__", "constructor", "self", "request", "host"), odd=({"a": 1}, "x", None)),
        Values(
            fields=("grammar_key", "block_hashes", "hf_overrides", "trust_remote_code", "lora_path", "extra_body"),
            odd=({"a": 1}, "x" * 1000, True),
        ),
    ),
    "B16": (  # as a field; `test_B_names` has the header
        Values(
            fields=("request_id",),
            types=(5,),
            ranges=("", "a b", "x" * 129, "a\r\nb: c", "a\n", "ü", LONG),
            odd=("mine", "x" * 128),
        ),
    ),
}


def cases(row: str, known: set[str], refusing: set[str]) -> Iterator[tuple[str, Any, str]]:
    """(field, value, verdict) of a row for one route: type, range or odd.

    Args:
        known: the fields of its body; what the row says of others is odd there.
        refusing: those of them that are refused altogether, as far as they say anything.
    """
    for values in ROWS[row]:
        for field in values.fields:
            for verdict, given in (("type", values.types), ("range", values.ranges), ("odd", values.odd)):
                for value in given:
                    if field in refusing:
                        yield field, value, "range" if value and value is not True else "odd"
                    elif field in known:
                        yield field, value, verdict
            if field not in known:
                strange = (*values.types, *values.ranges, *values.odd)
                yield field, strange[0], "odd"
