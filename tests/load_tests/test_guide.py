"""`bench guide` on a tiny model: it measures both sides, and its schemas are as large and as new as it says."""

import argparse
import json
import random
from pathlib import Path

import jsonschema
import pytest

from troupellm.load_tests.bench.guide import ENDLESS, new_schema, run
from troupellm.load_tests.flags.engine import guide as add_flags


@pytest.mark.slow
def test_the_report_has_both_sides(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    report = tmp_path / "report.json"
    small = ["--models", "tiny", "--batches", "1", "3", "--output-len", "8", "--repeats", "2", "--schemas", "2"]
    assert run(parser.parse_args([*small, "--embedded", "--threads", "1", "--result-json", str(report)])) == 0
    content = json.loads(report.read_text())
    assert [(side["batch"], len(side["plain"]), len(side["guided"])) for side in content["time_per_output_token"]] == [
        (1, 2, 2),
        (3, 2, 2),
    ]
    assert all(side["ratio"] > 0 for side in content["time_per_output_token"])
    (first,) = content["first_token"]
    assert len(first["plain"]) == len(first["guided"]) == 2


def test_new_schemas_are_new_and_of_their_size() -> None:
    source = random.Random(0)
    schemas = [new_schema(5000, source) for _ in range(5)]
    for schema in (*schemas, ENDLESS):
        jsonschema.Draft202012Validator.check_schema(schema)
    assert all(5000 <= len(json.dumps(schema)) < 5500 for schema in schemas)
    assert not set(schemas[0]["properties"]) & set(schemas[1]["properties"])
