"""`bench serve`: flags in, a run against a server, a table and files out."""

import argparse
import asyncio
import ipaddress
import json
import math
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from troupellm.load_tests.client import arrivals, console, datasets, metrics
from troupellm.load_tests.client.client import Target, exchange
from troupellm.load_tests.client.driver import Run, drive
from troupellm.load_tests.client.records import RequestRecord, SampleRequest
from troupellm.load_tests.flags import serve as flags

EXIT_FAILED = 1
EXIT_USAGE = 2
POLL_SECONDS = 0.25


class BenchError(Exception):
    """The run cannot start; the text is for the user."""


def run(args: argparse.Namespace) -> int:
    """Exit code 0 when every request succeeded, 1 when some failed or the server is not there, 2 for usage."""
    flags.settle(args)
    if args.peers is not None:
        from troupellm.load_tests.peers.serve_command import run as run_peers

        return run_peers(args)
    if problem := flags.check(args):
        print(f"bench serve: {problem}", file=sys.stderr)
        return EXIT_USAGE
    try:
        report, result = _measure(args)
    except (BenchError, datasets.DatasetError) as error:
        print(f"bench serve: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(console.table(report, args.percentile_metrics, args.metric_percentiles))
    _write_files(args, report, result)
    return EXIT_FAILED if report["failed"] else 0


def _measure(args: argparse.Namespace) -> tuple[dict[str, Any], Run]:
    url = _server_url(args)
    made = datasets.make_requests(args, 1 + args.num_warmups)
    samples, before = made[: args.num_prompts], made[args.num_prompts :]
    listed = _first_model(url, args) if not args.model or args.ready_check_timeout_sec else ""
    model = args.model or listed
    chat = args.backend == "openai-chat"
    if chat and not all(isinstance(sample.prompt, str) for sample in made):
        raise BenchError("chat needs text prompts")
    target = Target.make(
        url,
        url.path.rstrip("/") + (args.endpoint or ("/v1/chat/completions" if chat else "/v1/completions")),
        api_key=_api_key(args),
        more_headers=dict(args.header),
        chat=chat,
        model=args.served_model_name or model,
        body=_common_body(args),
        timeout=args.request_timeout_sec,
    )
    times = arrivals.arrival_times(
        len(samples),
        args.request_rate,
        burstiness=args.burstiness,
        ramp_up=args.ramp_up_strategy,
        start_rps=args.ramp_up_start_rps or 0.0,
        end_rps=args.ramp_up_end_rps or 0.0,
        seed=args.seed,
    )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        result = runner.run(_run(args, target, samples, times, before))
    return _report(args, model, result), result


def _common_body(args: argparse.Namespace) -> dict[str, Any]:
    sampling = {name: value for name in flags.SAMPLING if (value := getattr(args, name)) is not None}
    ending = {"ignore_eos": True} if args.ignore_eos else {}
    return {"temperature": args.temperature, **sampling, **ending, **args.extra_body}


async def _run(
    args: argparse.Namespace,
    target: Target,
    samples: list[SampleRequest],
    times: list[float],
    before: list[SampleRequest],
) -> Run:
    """One request alone proves that the set-up works, then the warm-ups, then the run."""
    from tqdm import tqdm

    first, *warmups = before
    if args.ready_check_timeout_sec:
        probe = RequestRecord(index=0, wanted_tokens=first.output_len, ignore_eos=args.ignore_eos)
        await exchange(target, first, probe)
        if probe.error:
            raise BenchError(f"the first request failed: {probe.error}")
    if warmups:
        await drive(target, warmups, [0.0] * len(warmups), max_concurrency=args.max_concurrency)
    with tqdm(total=len(samples), disable=args.disable_tqdm, unit="req") as bar:
        return await drive(
            target,
            samples,
            times,
            max_concurrency=args.max_concurrency,
            ignore_eos=args.ignore_eos,
            time_limit=args.max_duration_sec,
            on_end=lambda record: bar.update(),
        )


def _report(args: argparse.Namespace, model: str, result: Run) -> dict[str, Any]:
    head = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model,
        "tokenizer_id": model,
        "num_prompts": args.num_prompts,
        **dict(args.metadata),
        "request_rate": "inf" if math.isinf(args.request_rate) else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
    }
    if args.ramp_up_strategy:
        head["ramp_up_strategy"] = args.ramp_up_strategy
        head["ramp_up_start_rps"] = args.ramp_up_start_rps
        head["ramp_up_end_rps"] = args.ramp_up_end_rps
    body = metrics.build_report(
        result.records,
        result.start,
        result.duration,
        percentiles=args.metric_percentiles,
        selected=args.percentile_metrics,
        goodput=dict(args.goodput or ()),
    )
    return {**head, **body, "client": metrics.client_section(result.records)}


def _write_files(args: argparse.Namespace, report: dict[str, Any], result: Run) -> None:
    path = _result_path(args, report)
    if args.save_result or args.save_detailed or args.append_result:
        content = {**report, **(metrics.details(result.records, result.start) if args.save_detailed else {})}
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a" if args.append_result else "w", encoding="utf-8") as file:
            file.write(("\n" if file.tell() else "") + json.dumps(content))
        print(f"report: {path}")
    if args.html_report is not None:
        from troupellm.load_tests.client import page

        try:
            text = page.render(report, result.records, result.start, dict(args.goodput or ()))
        except ModuleNotFoundError as error:
            print(f"bench serve: --html-report needs {error.name}, of the test tools (make test)", file=sys.stderr)
            return
        html = Path(args.html_report) if args.html_report else path.with_suffix(".html")
        html.parent.mkdir(parents=True, exist_ok=True)
        html.write_text(text, encoding="utf-8")
        print(f"report: {html}")


def _result_path(args: argparse.Namespace, report: dict[str, Any]) -> Path:
    name: str | None = args.result_filename
    if name is None:
        rate = f"{report['request_rate']}qps"
        if args.ramp_up_strategy:
            rate = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
        concurrency = f"-concurrency{args.max_concurrency}" if args.max_concurrency else ""
        base_model = str(report["model_id"]).rsplit("/", maxsplit=1)[-1]
        name = f"{args.label or args.backend}-{rate}{concurrency}-{base_model}-{report['date']}.json"
    return Path(args.result_dir) / name


def _server_url(args: argparse.Namespace) -> SplitResult:
    host = f"[{args.host}]" if ":" in args.host and not args.host.startswith("[") else args.host
    address = args.base_url or f"http://{host}:{args.port}"
    try:
        url = urlsplit(address)
        usable = url.scheme in ("http", "https") and url.hostname and url.port != 0
    except ValueError as error:
        raise BenchError(f"{address} is not an http address: {error}") from None
    if not usable or url.hostname is None:
        raise BenchError(f"{address} is not an http address")
    if not args.allow_remote and not is_loopback(url.hostname):
        raise BenchError(f"{url.hostname} is not this machine; --allow-remote sends load elsewhere")
    return url


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _first_model(url: SplitResult, args: argparse.Namespace) -> str:
    """Wait until the server lists its models.

    Raises:
        BenchError: it did not in --ready-check-timeout-sec, or refused.
    """
    import httpx

    key = _api_key(args)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    headers |= {name.lower(): value for name, value in args.header}
    deadline = time.monotonic() + args.ready_check_timeout_sec
    with httpx.Client(base_url=url.geturl(), headers=headers, timeout=10.0, trust_env=False) as client:
        while True:
            try:
                reply = client.get("/v1/models")
                if reply.status_code == 200:
                    return str(reply.json()["data"][0]["id"])
                problem = f"GET /v1/models answered {reply.status_code}"
            except (httpx.HTTPError, ValueError, LookupError) as error:
                reply, problem = None, f"GET /v1/models: {str(error) or type(error).__name__}"
            if time.monotonic() >= deadline or (reply is not None and reply.status_code in (401, 403, 404)):
                raise BenchError(f"no server at {url.geturl()}: {problem}")
            time.sleep(POLL_SECONDS)


def _api_key(args: argparse.Namespace) -> str | None:
    return args.api_key or os.environ.get("OPENAI_API_KEY")


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
