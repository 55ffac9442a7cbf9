"""Schemathesis over a running server, as a process of its own."""

import json
import sys
from pathlib import Path
from typing import Any

import anyio
import httpx

CHECKS = (
    "not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,"
    "response_schema_conformance,unsupported_method"
)
_FEW = {"type": "integer", "minimum": 1, "maximum": 3}
_LENGTHS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n")


async def fuzz(
    client: httpx.AsyncClient, folder: Path, *options: str, only: tuple[str, ...] = (), key: str = ""
) -> dict[str, Any]:
    """Send what the server's own document allows and forbids; the run's report.

    The served model is named and answers are kept short: otherwise most requests would end at an unknown model, and the
    rest would take their time. All else is as the document says.
    """
    document = (await client.get("/openapi.json")).raise_for_status().json()
    models = [card["id"] for card in (await client.get("/v1/models")).json()["data"]]
    for schema in document["components"]["schemas"].values():
        _narrow(schema, models)
    if only:
        document["paths"] = {path: what for path, what in document["paths"].items() if path.startswith(only)}
    file, report = folder / "openapi.json", folder / "report.json"
    file.write_text(json.dumps(document))
    command = [sys.executable, "-m", "schemathesis.cli", "run", str(file), "--url", str(client.base_url)]
    command += ["--checks", CHECKS, "--mode", "all", "--generation-deterministic", "--continue-on-failure"]
    command += ["--request-timeout", "60", "--no-color", "--report-json-path", str(report), *options]
    command += ["-H", f"Authorization: Bearer {key}"] if key else []
    done = await anyio.run_process(command, check=False, cwd=folder)
    output = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, output
    return {"output": output, "report": json.loads(report.read_text())}


def _narrow(schema: dict[str, Any], models: list[str]) -> None:
    fields = schema.get("properties", {})
    if not schema.get("title", "").endswith("Request"):
        return
    needed = set(schema.get("required", ()))
    if "model" in fields:
        fields["model"] = {"type": "string", "enum": models}
        needed.add("model")
    for name in _LENGTHS:
        if name in fields:
            fields[name] = _FEW
            needed.add(name)
    if "queue_timeout" in fields:  # who asks not to wait at all is told 503, rightly
        fields["queue_timeout"] = {"type": "number", "minimum": 30}
    schema["required"] = sorted(needed)
