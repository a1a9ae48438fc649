"""What commands print: steps of an answer, progress lines, durations, findings, YAML."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ragcache_cli.commands import doctor
from ragcache_cli.commands.ask import (
    Reply,
    render_citations,
    render_explanation,
    render_timing,
    steps,
)
from ragcache_cli.commands.progress import IngestProgress, describe
from ragcache_cli.commands.status import describe_cache
from ragcache_cli.kubernetes.render import capabilities_of, render_yaml
from ragcache_cli.local.platform import ComponentEvent
from ragcache_cli.local.supervision import ProcessPhase, ProcessState
from ragcache_cli.models.cache import model_folder
from ragcache_cli.models.catalog import SMOLLM2
from ragcache_cli.output.console import duration, printable
from ragcache_core.errors import InvalidInput
from ragcache_operator.spec.manifest import parse_manifest
from ragcache_operator.spec.ragcache import EngineSpec, GPUSpec, RagCacheSpec

milliseconds = st.floats(0, 1e6)


@given(
    st.fixed_dictionaries(
        {"first_token": milliseconds},
        optional={
            name: milliseconds | st.none()
            for name in ("retrieve", "tokenize", "queue", "load", "prefill", "embed", "search")
        },
    )
)
def test_steps_add_up_to_the_first_token(timing: dict[str, Any]) -> None:
    found = steps(timing, {})
    assert [step.name for step in found][-1] == "other"
    assert all(step.ms >= 0 for step in found)
    whole = sum(step.ms for step in found)
    assert whole == pytest.approx(max(timing["first_token"], whole - found[-1].ms))


def test_a_load_says_what_was_blended() -> None:
    timing = {"load": 20.0, "recompute": 4.5}
    cache = {"prompt_tokens": 2000, "loaded_tokens": 1700, "blended_tokens": 1500}
    [load] = steps(timing, cache | {"recomputed_tokens": 300})
    assert load.note == "1,700 tokens; 1,500 blended, 300 of them recomputed in 4.5 ms"
    # Of an exact load, and of a gateway that knows no blend, there is nothing to say.
    for exact in ({**cache, "blended_tokens": 0}, {"loaded_tokens": 1700}):
        [load] = steps(timing, exact)
        assert load.note == "1,700 tokens"


def test_a_stream_is_put_together() -> None:
    reply = Reply()
    added = [
        reply.add(chunk)
        for chunk in (
            {"choices": [{"delta": {"role": "assistant"}}], "ragcache": {"citations": [{}]}},
            {"choices": [{"delta": {"content": "a"}, "finish_reason": None}]},
            {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]},
            {"choices": [], "ragcache": {"cache": {"loaded_tokens": 1}, "citations": None}},
        )
    ]
    assert added == ["", "a", "b", ""]
    assert (reply.text, reply.finish_reason) == ("ab", "stop")
    assert reply.citations == [{}]
    assert reply.cache == {"loaded_tokens": 1}


def test_an_answer_without_sources_or_times_has_no_tables() -> None:
    assert render_citations(Reply()) is None
    assert render_timing(Reply()) is None
    assert render_timing(Reply(timing_ms={"first_token": 0.0})) is None


@pytest.mark.parametrize(
    ("pages", "said"),
    [((None, None), ""), ((2, None), ", page 2"), ((2, 4), ", pages 2-4")],
)
def test_a_citation_names_its_pages(pages: tuple[int | None, int | None], said: str) -> None:
    cited = {"chunk": "a#0", "title": "Guide", "page": pages[0], "page_end": pages[1]}
    table = render_citations(Reply(citations=[cited]))
    assert table is not None
    assert str(next(iter(table.columns[3].cells))) == f"Guide{said}"


@given(st.text())
def test_nothing_printable_steers_a_terminal(text: str) -> None:
    assert not set(printable(text)) & {"\x1b", "\x9b", "\x07", "\r", "\b", "\0", "\x7f"}


def event(state: ProcessState, **more: Any) -> ComponentEvent:
    return ComponentEvent(
        "engine-main", state, 12.34, more.pop("crash_loop", False), Path("e.log"), **more
    )


def test_progress_lines_read_well_without_a_terminal() -> None:
    starting, _ = describe(event(ProcessState(ProcessPhase.STARTING)))
    assert starting == "   12.3s engine-main  starts"
    dead = ProcessState(
        ProcessPhase.BACKOFF, since=5, start_at=7, deaths=3, cause="ended with status 1"
    )
    line, log = describe(event(dead, crash_loop=True, lines=("out of memory",)))
    assert line == (
        "   12.3s engine-main  restarts: ended with status 1 (next try in 2.0 s)"
        "; it died 3 times in a row, see e.log"
    )
    assert log == ("out of memory",)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-1, "0s"), (59.9, "59s"), (61, "1m 1s"), (3 * 3600 + 720, "3h 12m"), (90_000, "1d 1h")],
)
def test_durations_show_two_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_cache_counters_are_a_line() -> None:
    nothing = {
        "variants": 0,
        "disk_bytes": 0,
        "memory_bytes": 0,
        "memory_capacity_bytes": 0,
        "hits": 0,
        "misses": 0,
        "misses_by_reason": {},
        "shards": [{"address": "a:1", "up": True, "reset_at_ms": 0, "reset_reason": ""}],
    }
    assert describe_cache(nothing).endswith("; nothing read yet")
    some = nothing | {"variants": 1200, "disk_bytes": 10**9, "hits": 12, "misses": 4}
    assert describe_cache(some).startswith("1,200 variants, 1,000.0 MB on disk")
    assert describe_cache(some).endswith("75% of 16 reads hit")
    reasons = {"never_stored": 1, "evicted": 3}
    missed = describe_cache(some | {"misses_by_reason": reasons})
    assert missed.endswith("hit (misses: 3 evicted, 1 never stored)")
    away = describe_cache(nothing | {"shards": [{"address": "b:1", "up": False}]})
    assert away.endswith("; no answer from b:1")
    reset = {"address": "c:1", "up": True, "reset_at_ms": 60_000, "reset_reason": "Corruption"}
    assert describe_cache(nothing | {"shards": [reset]}).endswith(
        "c:1 has started empty at 1970-01-01 00:01 UTC, because its metadata was damaged "
        "(Corruption)"
    )


def test_findings_come_with_a_fix_or_none() -> None:
    spec, gib = RagCacheSpec(), 1 << 30
    assert doctor.memory(spec, 64 * gib).is_well
    tight = doctor.memory(spec, 4 * gib)
    assert tight.found == "4.0 GiB free, about 8.0 GiB needed"
    assert "kvMemory" in tight.fix
    theirs = RagCacheSpec(engines=(EngineSpec(url="http://vllm:8000"),))
    assert doctor.memory(theirs, 4 * gib).found == "4.0 GiB free, about 3.0 GiB needed"
    on_gpu = RagCacheSpec(
        engines=(EngineSpec.model_validate({"device": "cuda", "hostTier": "8Gi"}),)
    )
    assert doctor.memory(on_gpu, 64 * gib).found == "64.0 GiB free, about 21.0 GiB needed"
    assert doctor.disk(Path("data"), 50 * gib).is_well
    assert not doctor.disk(Path("data"), gib).is_well
    assert doctor.importable("json", "").is_well
    broken = doctor.importable("ragcache_no_such_module", "pip install it")
    assert broken.found.startswith("does not load: ModuleNotFoundError")
    assert broken.fix == "pip install it"


def test_rendered_yaml_is_plain() -> None:
    cache = parse_manifest(
        {
            "apiVersion": "ragcache.dev/v1alpha1",
            "kind": "RagCache",
            "metadata": {"name": "docs"},
        }
    )
    text = render_yaml(cache)
    assert "&id" not in text
    assert "!!" not in text
    documents = list(yaml.safe_load_all(text))
    kinds = {d["kind"] for d in documents}
    assert kinds >= {"Deployment", "StatefulSet", "Service", "ConfigMap", "NetworkPolicy"}
    # Objects that are not in a cluster yet have no owner.
    assert not any("ownerReferences" in d["metadata"] for d in documents)


@pytest.mark.parametrize("version", ["1.29", "v1.31.4"])
def test_rendering_for_a_version_leaves_out_optional_apis(version: str) -> None:
    manifest = {
        "apiVersion": "ragcache.dev/v1alpha1",
        "kind": "RagCache",
        "metadata": {"name": "docs"},
        "spec": {"telemetry": {"podMonitor": {"enabled": True}}},
    }
    cache = parse_manifest(manifest)
    kinds = [d["kind"] for d in yaml.safe_load_all(render_yaml(cache, capabilities_of(version)))]
    assert "PodMonitor" not in kinds
    assert "PodDisruptionBudget" in kinds


@pytest.mark.parametrize("version", ["1.28", "2.0", "1", "newest", "1.x"])
def test_a_version_that_is_not_supported_is_refused(version: str) -> None:
    with pytest.raises(InvalidInput, match=r"--kube-version: .*; write 1\.29 or newer"):
        capabilities_of(version)


def test_the_doctor_compares_the_gpus_of_nodes_with_the_object() -> None:
    gpu, mig = "nvidia.com/gpu", "nvidia.com/mig-3g.40gb"
    engines = (
        EngineSpec(name="a", device="cuda", replicas=2),
        EngineSpec(name="b", device="cuda"),
        EngineSpec(name="c", device="cuda", gpu=GPUSpec(resource=mig)),
        EngineSpec(name="d"),
    )
    nodes = [{"status": {"allocatable": {gpu: "1"}}}, {"status": {"allocatable": {gpu: "1"}}}]
    few, none = doctor.node_gpus(RagCacheSpec(engines=engines), nodes)
    assert (few.what, few.found) == (gpu, "the nodes have 2, and the object asks for 3")
    assert few.fix == "add nodes, or lower replicas or tensorParallel"
    assert none.found == "the nodes have 0, and the object asks for 1"
    assert "device plugin" in none.fix
    [enough] = doctor.node_gpus(RagCacheSpec(engines=engines[:1]), nodes)
    assert enough.is_well
    assert not list(doctor.node_gpus(RagCacheSpec(engines=engines[3:]), nodes))


def test_the_doctor_says_that_this_machine_has_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(doctor, "loads", doctor.Finding)
    spec = RagCacheSpec(engines=(EngineSpec(device="cuda"),))
    found = {one.what: one for one in doctor.examine(spec, tmp_path)}
    assert "no NVIDIA GPU: nvidia-smi is not installed" in found["GPU"].found
    assert found["CUDA"].fix == found["vllm"].fix == "pip install 'ragcache[engine-gpu]'"


def test_the_doctor_finds_a_bundled_model_that_is_missing_or_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAGCACHE_CACHE", str(tmp_path))
    spec = RagCacheSpec()

    def finding() -> doctor.Finding:
        return next(found for found in doctor.examine(spec, tmp_path) if found.what == "model")

    assert finding().found == "bundled:smollm2 is not fetched yet"
    folder = model_folder(SMOLLM2)
    folder.mkdir(parents=True)
    for name, check in SMOLLM2.files.items():
        (folder / name).touch()
        os.truncate(folder / name, check.num_bytes)
    assert "is damaged" in finding().found
    assert finding().fix == "run `ragcache model fetch smollm2`"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_ingest_shows_a_bar_on_a_terminal_alone(is_terminal: bool) -> None:
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=is_terminal, width=120)
    with IngestProgress(console, 3) as progress:
        progress.advance(30)
        progress.advance(0)
        assert progress.chunks_per_s > 0
    if is_terminal:
        assert "2/3" in shown.getvalue()
        assert "30 chunks" in shown.getvalue()
    else:
        assert shown.getvalue() == ""


def test_an_explanation_shows_outcome_and_reason_of_each_part() -> None:
    part = {
        "chunk": None,
        "start": 0,
        "tokens": 10,
        "outcome": "cached",
        "cached_tokens": 10,
        "loaded_tokens": 0,
        "computed_tokens": 0,
        "recomputed_tokens": 0,
        "tier": None,
        "reason": "",
        "planned": "cached",
        "planned_reason": "resident",
        "planned_source": "engine:127.0.0.1:1",
    }
    missing = part | {
        "chunk": "a.md#0",
        "start": 10,
        "outcome": "computed",
        "cached_tokens": 0,
        "computed_tokens": 10,
        "reason": "evicted",
        "planned": "load",
        "planned_reason": "stored",
        "planned_source": "store:127.0.0.1:7",
    }
    unplanned = {"planned": None, "planned_reason": "", "planned_source": None}
    question = missing | unplanned | {"chunk": None, "start": 20, "reason": ""}
    times = {"load": 1.0, "select": 0.0, "passes": 9.0, "total": 10.0}
    explanation = {
        "id": "chatcmpl-1",
        "prompt_tokens": 30,
        "reuse": "exact",
        "engine": "127.0.0.1:1",
        "miss": "evicted",
        "parts": [part, missing, question],
        "time": {"queue_ms": 2.0, "measured_ms": times, "predicted_ms": None},
        "plan": {
            "engine": "127.0.0.1:1",
            "predicted_ms": {"total": 12.0},
            "next_best": {
                "engine": "127.0.0.1:2",
                "kind": "compute",
                "predicted_ms": {"total": 30.0},
            },
            "position": {
                "band": 0,
                "cached_share": 0.75,
                "delay_ms": 2500,
                "window_ms": 10_000,
                "tenant_delay_ms": 0,
            },
        },
    }
    out = io.StringIO()
    Console(file=out, width=120).print(render_explanation(explanation))
    lines = out.getvalue().splitlines()
    assert [line.split()[0] for line in lines[3:6]] == ["template", "a.md#0", "question"]
    assert lines[3].split()[-3:] == ["cached:", "resident", "engine:127.0.0.1:1"]
    assert lines[4].split()[1:5] == ["10", "computed", "10", "evicted"]
    assert lines[4].split()[5:] == ["load:", "stored", "store:127.0.0.1:7"]
    assert lines[5].split()[1:] == ["10", "computed", "10"]
    assert lines[6:10] == [
        "queue 2.0 ms, then 10.0 ms (load 1.0, select 0.0, passes 9.0)",
        "planned 12.0 ms on 127.0.0.1:1",
        "queued in band 0, 75% cached: 2,500 of 10,000 ms after its arrival",
        "next best: 30.0 ms, compute on 127.0.0.1:2",
    ]
