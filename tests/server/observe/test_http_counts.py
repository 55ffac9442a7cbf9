"""Answers by method, route and status, in one process and added up over several."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from troupellm.server.observe.metrics import HttpCounts
from troupellm.server.observe.vitals import Vitals, VitalSigns


def samples(text: bytes) -> dict[tuple[str, ...], float]:
    families = text_string_to_metric_families(text.decode())
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_counts_of_several_processes_add_up_and_nothing_counts_twice() -> None:
    total, fronts = HttpCounts(), [HttpCounts(), HttpCounts()]
    for front in fronts:
        front.count("GET", "/metrics", 200)
        total.add(front.take())
    fronts[0].count("POST", "/v1/completions", 200)
    fronts[0].count("POST", "/v1/completions", 200)
    fronts[0].count("BREW", "unmatched", 404)
    total.add(fronts[0].take())
    assert fronts[0].take() == ()
    total.add(fronts[1].take())
    assert samples(total.text(3)) == {
        ("troupellm_http_requests_total", "GET", "/metrics", "200"): 2,
        ("troupellm_http_requests_total", "POST", "/v1/completions", "200"): 2,
        ("troupellm_http_requests_total", "other", "unmatched", "404"): 1,
        ("troupellm_http_requests_in_flight",): 3,
    }


def test_one_process_shows_what_it_has_counted() -> None:
    counts = HttpCounts()
    for _ in range(2):
        counts.count("GET", "/health", 200)
        text = counts.text(0)
    assert samples(text)["troupellm_http_requests_total", "GET", "/health", "200"] == 2


@pytest.mark.anyio
async def test_vitals_of_several_processes_are_one_family() -> None:
    vitals = Vitals(0.0, "engine")
    vitals.count_templates = lambda: 6
    text = vitals.text(
        {"front-0": VitalSigns(0.5, 3, tasks=7, connections=4, body_bytes=9), "front-1": VitalSigns(0.25, None)}
    )
    assert text.count(b"# TYPE troupellm_loop_lag_seconds") == 1
    found = samples(text)
    assert found["troupellm_loop_lag_seconds", "front-0"] == 0.5
    assert found["troupellm_loop_lag_seconds", "front-1"] == 0.25
    assert found["troupellm_tasks", "front-0"] == 7
    assert found["troupellm_http_connections", "front-0"] == 4
    assert found["troupellm_http_body_bytes", "front-0"] == 9
    assert found["troupellm_http_bodies_waiting", "front-0"] == 0
    assert found["troupellm_template_processes", "engine"] == 6
    assert found["troupellm_http_connections_dropped_total", "front-0"] == 0
    assert ("troupellm_http_connections", "engine") not in found
    assert found["troupellm_log_lines_dropped_total", "front-0"] == 3
    assert ("troupellm_log_lines_dropped_total", "front-1") not in found
