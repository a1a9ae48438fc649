"""The whole product as a newcomer runs it: ``ragcache up`` on the test model, then questions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from harness.browser import (
    begin_to_ask,
    compare_and_wait,
    console_page,
    fill,
    needs_chromium,
    select_tab,
    texts,
    until_answered,
)
from harness.processes import free_port
from harness.tiny_model import TINYRAG
from models.tinyrag.handbook import Handbook, Question, make_handbook, sample_questions
from ragcache_cli.local.state_file import ComponentRecord, read_record
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = 40
SEED = 20


@dataclass(frozen=True)
class Platform:
    """A running platform and the handbook in it."""

    data: Path
    url: str
    handbook: Handbook
    pages: Path

    def ragcache(self, *arguments: str, status: int = 0) -> str:
        """Run a command of the cli against this platform; returns what it printed."""
        done = subprocess.run(
            [sys.executable, "-m", "ragcache_cli", *arguments],
            env={**os.environ, "RAGCACHE_GATEWAY": self.url, "NO_COLOR": "1"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout

    def ask(self, question: str, **extension: Any) -> dict[str, Any]:
        reply = self.post(question, **extension)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def post(self, question: str, timeout_s: float = 120, **extension: object) -> httpx.Response:
        body = {
            "messages": [{"role": "user", "content": question}],
            "ragcache": {"top_k": 6, **extension},
        }
        return httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=timeout_s)

    def ask_when_ready(self, question: str) -> dict[str, Any]:
        """Ask until it is answered; return the answer."""

        def answer() -> dict[str, Any] | None:
            reply = self.post(question)
            assert reply.status_code in (200, 503), reply.text
            return reply.json() if reply.status_code == 200 else None

        found = wait_until(answer, "an answer", timeout_s=300)
        assert found is not None
        return found

    def part(self, component: str) -> ComponentRecord:
        record = read_record(self.data)
        assert record is not None
        (found,) = (part for part in record.parts if part.component == component)
        return found

    def kill(self, component: str) -> None:
        """As a crash would: the process and its children, at once."""
        os.killpg(self.part(component).pid, signal.SIGKILL)

    def wait_until_saved(self) -> None:
        """Saving happens behind the answers: until no more arrives for a while."""
        deadline = time.monotonic() + 120
        before = -1
        while True:
            variants = httpx.get(f"{self.url}/v1/cache", timeout=60).json()["variants"]
            if variants == before > 0:
                return
            assert time.monotonic() < deadline, "nothing is saved"
            before = variants
            time.sleep(2)

    def singles(self) -> list[Question]:
        drawn = sample_questions(self.handbook, 30, "held_out")
        return [question for question in drawn if question.kind == "single"]


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """Up, with a handbook ingested by the cli."""
    folder = tmp_path_factory.mktemp("platform")
    manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    port = free_port()
    manifest["spec"]["gateway"]["port"] = port
    # A model of the user's own lies in a folder; the demo's test runs a bundled one by its name.
    model = shutil.copytree(ROOT / "models" / "tinyrag" / "model", folder / "model")
    manifest["spec"] |= TINYRAG
    manifest["spec"]["model"] = {"source": f"path:{model}", "name": "tinyrag"}
    (folder / "ragcache.yaml").write_text(yaml.safe_dump(manifest))
    handbook = make_handbook(SEED, DOCUMENTS, "held_out")
    pages = folder / "handbook"
    pages.mkdir()
    for document in handbook.documents:
        (pages / f"{document.id}.md").write_text(document.text + "\n")
    platform = Platform(folder / "data", f"http://127.0.0.1:{port}", handbook, pages)
    data = str(platform.data)
    try:
        manifest_path = str(folder / "ragcache.yaml")
        platform.ragcache("up", "-f", manifest_path, "--data", data, "--detach")
        # The model's training had no labels.
        platform.ragcache("collection", "patch", "default", "--no-labels")
        said = platform.ragcache("ingest", str(pages))
        assert f"{DOCUMENTS} written, 0 unchanged, 0 failed, 0 skipped" in said
        yield platform
    finally:
        platform.ragcache("down", "--data", data)


def test_facts_are_answered_with_citations(platform: Platform) -> None:
    right = 0
    asked = platform.singles()[:10]
    for question in asked:
        answer = platform.ask(question.text)
        cited = {c["document_id"].removesuffix(".md") for c in answer["ragcache"]["citations"]}
        said = answer["choices"][0]["message"]["content"].strip()
        right += said == question.answer and cited.issuperset(question.supports)
    assert right >= 8, f"{right} of {len(asked)}"


@needs_chromium
async def test_the_console_shows_a_miss_then_a_hit_and_both_sides(
    platform: Platform, tmp_path: Path
) -> None:
    # Documents of its own, so that nothing has stored their KV.
    handbook = make_handbook(SEED + 1, 8, "held_out")
    async with httpx.AsyncClient(base_url=f"{platform.url}/v1", timeout=60) as client:
        assert (await client.put("/collections/console", json={})).status_code == 200
        for document in handbook.documents:
            body = {"id": f"{document.id}.md", "text": document.text, "collection": "console"}
            assert (await client.post("/documents", json=body)).status_code == 200
    question = sample_questions(handbook, 1, "held_out")[0].text
    async with console_page(platform.url, tmp_path / "profile") as page:
        await fill(page, "ask-collection", "console")
        await begin_to_ask(page, question)
        await until_answered(page)
        assert await texts(page, "#ask-state") == ["The answer is complete."]
        said = " ".join(await texts(page, ".stages li"))
        for stage in ("The search has ended with 4 hits", "The plan is made", "has accepted"):
            assert stage in said
        assert "The first token has come" in said
        steps = " ".join(await texts(page, ".steps td:first-child"))
        for step in ("Search", "Wait in the engine", "Prefill", "Generate the answer"):
            assert step in steps
        first = [row for row in await texts(page, ".parts tbody tr") if ".md#" in row]
        assert len(first) >= 4
        assert all("Miss" in row and "It was never stored" in row for row in first), first

        await begin_to_ask(page, question)
        await until_answered(page)
        again = [row for row in await texts(page, ".parts tbody tr") if ".md#" in row]
        assert len(again) == len(first)
        # The engine's prefix cache has whole blocks, so the last chunk can be a miss.
        hits = [row for row in again if "Cachedfrom device" in row and "Miss" not in row]
        assert len(hits) >= len(again) - 1, again

        await select_tab(page, "compare")
        await fill(page, "compare-collection", "console")
        await compare_and_wait(page, question)
        assert "The two answers are equal." in await texts(page, "#compare-result .summary")
        on = [row for row in await texts(page, "#compare-on .parts tbody tr") if ".md#" in row]
        off = [row for row in await texts(page, "#compare-off .parts tbody tr") if ".md#" in row]
        assert sum("Miss" not in row for row in on) >= len(on) - 1, on
        assert all("The request set reuse to off." in row for row in off), off
        assert page.errors == []


def test_blend_reuses_chunks_after_other_chunks(platform: Platform) -> None:
    for question in platform.singles()[:10]:  # so that the store holds most pages
        platform.ask(question.text)
    right = blended = recomputed = 0
    drawn = sample_questions(platform.handbook, 60, "held_out")
    asked = [question for question in drawn[30:] if question.kind == "single"][:12]
    for question in asked:
        answer = platform.ask(question.text, reuse="blend", max_recompute_share=0.3)
        cache = answer["ragcache"]["cache"]
        blended += cache["blended_tokens"]
        recomputed += cache["recomputed_tokens"]
        right += answer["choices"][0]["message"]["content"].strip() == question.answer
    assert right >= 0.8 * len(asked), f"{right} of {len(asked)}"
    assert blended > 500
    assert recomputed > 0


def test_a_quality_report_is_measured_and_judges_later_blends(
    platform: Platform, tmp_path: Path
) -> None:
    question = platform.singles()[0].text
    before = platform.post(question, reuse="blend")
    assert before.headers["X-RagCache-Quality"] == "unverified"
    questions = tmp_path / "questions.jsonl"
    asked = sample_questions(platform.handbook, 40, "held_out")[-12:]
    questions.write_text("".join(json.dumps({"question": one.text}) + "\n" for one in asked))
    options = ("--questions", str(questions), "--top-k", "6", "--recompute-shares", "0.1,0.2")
    said = platform.ragcache(
        "quality", *options, "--max-tokens", "12", "--quality", "0.5", "--output", "json"
    )
    report = json.loads(said)
    assert report["verdict"] == "passed"
    assert [one["recompute_share"] for one in report["budgets"]] == [0.1, 0.2]
    for one in report["budgets"]:
        assert one["num_questions"] >= 8
        assert one["first_token_kl"] is not None
        assert one["recomputed_share"] <= one["recompute_share"] + 0.2  # and missing chunks
    after = platform.post(question, reuse="blend")
    assert after.headers["X-RagCache-Quality"] == "passed"
    assert after.headers["X-RagCache-Reuse"] == "blend"
    # The retriever keeps the report.
    state = httpx.get(f"{platform.url}/v1/quality", timeout=60).json()
    assert state["report"]["budgets"] == report["budgets"]


def test_a_second_ingest_changes_nothing(platform: Platform) -> None:
    said = platform.ragcache("ingest", str(platform.pages))
    assert f"0 written, {DOCUMENTS} unchanged, 0 failed, 0 skipped" in said


def test_the_command_line_shows_answer_sources_and_time(platform: Platform) -> None:
    question = platform.singles()[0]
    said = platform.ragcache("ask", question.text, "--top-k", "6")
    assert question.answer in said
    assert f"{question.supports[0]}.md" in said
    for step in ("retrieve", "queue", "prefill", "first token"):
        assert step in said
    said = platform.ragcache("status", "--data", str(platform.data))
    for part in ("gateway", "retriever", "engine-main", "cachestore"):
        assert part in said


def test_openais_own_client_streams_the_same_answer(platform: Platform) -> None:
    question = platform.singles()[1]
    whole = platform.ask(question.text)["choices"][0]["message"]["content"]
    with openai.OpenAI(base_url=f"{platform.url}/v1", api_key="unused", max_retries=0) as client:
        names = [model.id for model in client.models.list()]
        assert names == ["tinyrag"]
        stream = client.chat.completions.create(
            model="tinyrag",
            messages=[{"role": "user", "content": question.text}],
            stream=True,
            extra_body={"ragcache": {"top_k": 6}},
        )
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole


def test_a_deleted_document_is_cited_no_more(platform: Platform) -> None:
    question = platform.singles()[2]
    name = f"{question.supports[0]}.md"
    assert name in _cited(platform.ask(question.text))
    deleted = httpx.delete(f"{platform.url}/v1/documents/{name}", timeout=60).json()
    assert deleted["removed_variants"] > 0
    assert name not in _cited(platform.ask(question.text))
    platform.ragcache("ingest", str(platform.pages))
    assert name in _cited(platform.ask(question.text))


def _cited(answer: dict[str, Any]) -> set[str]:
    return {citation["document_id"] for citation in answer["ragcache"]["citations"]}


@pytest.mark.parametrize(
    ("path", "body", "status", "field"),
    [
        ("chat/completions", {"ragcache": {"collection": "nowhere"}}, 404, "nowhere"),
        ("chat/completions", {"messages": [{"role": "user", "content": " "}]}, 400, "content"),
        ("chat/completions", {"ragcache": {"top_k": 0}}, 400, "top_k"),
        ("chat/completions", {"ragcache": {"top_k": 10_000}}, 400, "top_k"),
        ("chat/completions", b'{"messages": [', 400, "JSON"),
        ("documents", {"id": "big", "text": "word " * 10_000_000}, 413, "MiB"),
        ("documents", {"id": "nul", "text": "a\0b"}, 400, "text"),
    ],
)
def test_bad_input_names_the_field_and_changes_nothing(
    platform: Platform, path: str, body: Any, status: int, field: str
) -> None:
    if isinstance(body, dict) and path == "chat/completions":
        body = {"messages": [{"role": "user", "content": "Who owns it?"}], **body}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    reply = httpx.post(f"{platform.url}/v1/{path}", content=content, headers=headers, timeout=60)
    assert reply.status_code == status, reply.text
    assert field in reply.json()["error"]["message"]


def test_a_binary_file_is_refused(platform: Platform) -> None:
    files = {"file": ("photo.md", bytes(range(256)) * 10)}
    reply = httpx.post(f"{platform.url}/v1/documents", files=files, timeout=60)
    assert reply.status_code == 400
    assert "is binary" in reply.json()["error"]["message"]


def test_a_killed_engine_is_a_clear_503_then_recovers_with_its_cache(platform: Platform) -> None:
    question = platform.singles()[3]
    before = platform.ask(question.text)
    platform.wait_until_saved()
    platform.kill("engine")
    refused = platform.post(question.text)
    assert refused.status_code == 503, refused.text
    assert int(refused.headers["Retry-After"]) >= 1
    assert "engine" in refused.json()["error"]["message"]
    after = platform.ask_when_ready(question.text)
    assert after["choices"][0]["message"]["content"] == before["choices"][0]["message"]["content"]
    assert after["ragcache"]["cache"]["loaded_tokens"] > 0


def test_a_killed_store_costs_no_answer(platform: Platform) -> None:
    """While questions are under way the store dies; all of them are answered."""
    questions = platform.singles()[4:10]
    replies: list[httpx.Response] = []
    killer = threading.Timer(0.05, platform.kill, ["cachestore"])
    killer.start()
    for question in questions:
        replies.append(platform.post(question.text))
    killer.join()
    assert [reply.status_code for reply in replies] == [200] * len(questions)
    wait_until(
        lambda: not platform.ask(questions[0].text)["ragcache"]["cache"]["miss"],
        "the store did not come back",
        timeout_s=300,
    )


def test_a_killed_retriever_keeps_what_it_acknowledged(platform: Platform) -> None:
    platform.kill("retriever")
    platform.ask_when_ready(platform.singles()[0].text)
    listed = httpx.get(f"{platform.url}/v1/documents", params={"limit": 1000}, timeout=60).json()
    assert {d["id"] for d in listed["data"]} == {p.name for p in platform.pages.iterdir()}
