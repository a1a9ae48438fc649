"""Prompts put together from chunks of other prompts, in a real vLLM server with a real store."""

from __future__ import annotations

import itertools
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.support.completion import Completion, complete
from bench.support.processes import COMPUTES_PLAIN, launch_engine, start_cachestore, wait_for_engine
from bench.support.stored_values import corrupt
from ragcache_core.blend.observation import observation_key
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.plan.prompt import Prompt, assemble, plan_blend, plan_exact
from ragcache_core.plan.reuse_plan import Action, ReusePlan
from ragcache_core.store_api import LookupKey
from ragcache_kv.model_folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2
from tests.helpers.clear_answers import is_clear
from tests.helpers.miss_reasons import STORE_AWAY
from tests.integration.engine.test_vllm import VOCABULARY, Platform

pytestmark = pytest.mark.timeout(900)

# Smaller than a prompt, so that its computation and its repair take several passes.
ENGINE_ARGUMENTS = ("--max-num-batched-tokens", "384")
HEAD_TOKENS = 300
LENGTHS = (131, 200, 177, 91, 150, 64)
DAMAGED = 5  # chunk whose value is damaged


def ids(name: str, count: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


CHUNKS = [ids(f"chunk {n}", length) for n, length in enumerate(LENGTHS)]


def prompt_of(*chunks: int, head: int = HEAD_TOKENS, question: str = "question") -> Prompt:
    return assemble(ids("head", head), [CHUNKS[n] for n in chunks], ids(question, 23))


@dataclass
class Blends(Platform):
    """Captured: the prompts that chunks were computed in."""

    captured: list[Prompt] = field(default_factory=list)

    def blend(
        self, prompt: Prompt, budget: float, max_tokens: int = 16
    ) -> tuple[Completion, engine_pb2.RequestRecord]:
        request = uuid.uuid4().hex
        plan = plan_blend(prompt, self.space, "public", request, budget).to_json()
        answer = complete(self.engine.url, prompt.token_ids, max_tokens=max_tokens, plan=plan)
        return answer, self.record(request)

    def ask_anew(self, prompt: Prompt) -> tuple[Completion, engine_pb2.RequestRecord]:
        """With an exact plan, and nothing of it in vLLM's own prefix cache."""
        request = uuid.uuid4().hex
        plan = plan_exact(prompt, self.space, "public", request).to_json()
        salt = uuid.uuid4().hex
        answer = complete(
            *(self.engine.url, prompt.token_ids), max_tokens=16, plan=plan, cache_salt=salt
        )
        return answer, self.record(request)

    def chunk_variants(self, prompt: Prompt) -> list[VariantKey]:
        return self.keys(prompt)[1:]


def clear_prompt(blends: Blends, order: tuple[int, ...], max_tokens: int) -> Prompt:
    """With these chunks, and a question whose answer does not hang on how sums are rounded."""
    return next(
        prompt
        for prompt in (prompt_of(*order, question=f"clear {n}") for n in itertools.count())
        if is_clear(blends.engine.url, prompt, max_tokens)
    )


@pytest.fixture(scope="module")
def blends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blends]:
    """A store that holds every chunk, captured and observed in two prompts."""
    folder = tmp_path_factory.mktemp("blends")
    store = start_cachestore(folder / "store")
    space = load_model_folder(str(tiny_model)).space("auto")
    engine = launch_engine(
        *(folder, tiny_model, store.address, *ENGINE_ARGUMENTS), settings=COMPUTES_PLAIN
    )
    captured = [prompt_of(0, 1, 2), prompt_of(3, 4, 5)]
    blends = Blends(folder, tiny_model, store, engine, space, captured)
    try:
        wait_for_engine(engine)
        client = StoreClient(store.address)
        for prompt in captured:
            blends.blend(prompt, 0.0)
            blends.wait_until_stored(prompt)
            wants = [LookupKey.for_variant(observation_key(key)) for key in blends.chunk_variants(prompt)]
            deadline = time.monotonic() + 60
            while not all(found.stored for found in client.lookup(wants).variants):
                assert time.monotonic() < deadline, "chunks are not observed"
                time.sleep(0.05)
        client.close()
        yield blends
    finally:
        blends.engine.service.stop()
        blends.store.service.stop()


@pytest.mark.parametrize("order", [(2, 0, 1), (4, 1, 3, 0), (1, 5), (2, 3, 4, 0, 1)])
def test_all_recomputed_are_the_tokens_of_a_full_computation(
    blends: Blends, order: tuple[int, ...]
) -> None:
    prompt = prompt_of(*order)
    answer, record = blends.blend(prompt, 1.0)
    context = prompt.chunk_ends[-1] - HEAD_TOKENS
    assert (record.blended_tokens, record.recomputed_tokens, record.miss) == (context, context, "")
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_nothing_recomputed_is_what_another_implementation_makes_of_it(blends: Blends) -> None:
    """Keys turned and put one behind the other, by transformers in float32."""
    prompt = prompt_of(2, 3, 1)
    request = uuid.uuid4().hex
    body = {
        "model": "model",
        "prompt": list(prompt.token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 10,
        "return_tokens_as_token_ids": True,
        "kv_transfer_params": {
            "ragcache": plan_blend(prompt, blends.space, "public", request, 0.0).to_json()
        },
    }
    reply = httpx.post(f"{blends.engine.url}/v1/completions", json=body, timeout=60).json()
    record = blends.record(request)
    assert (record.blended_tokens, record.recomputed_tokens) == (468, 0)
    [said] = reply["choices"][0]["logprobs"]["top_logprobs"]
    found = {int(token.removeprefix("token_id:")): value for token, value in said.items()}
    wanted, full = reference(blends, prompt)
    error = max(abs(found[token] - wanted[token]) for token in found)
    # The reuse is far from a full computation, and near to what it should be.
    assert error < 0.15, (found, [wanted[token] for token in found])
    assert max(abs(found[token] - full[token]) for token in found) > 4 * error


def reference(blends: Blends, prompt: Prompt) -> tuple[list[float], list[float]]:
    """Log-probabilities of the next token: over chunks put together, and computed in full."""
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, DynamicCache

    model = AutoModelForCausalLM.from_pretrained(blends.model, dtype=torch.float32)
    dim = model.config.head_dim
    theta = model.config.rope_parameters["rope_theta"]
    frequencies = theta ** (-torch.arange(0, dim, 2).double() / dim)

    def turned(keys: Any, delta: int) -> Any:
        angles = frequencies * delta
        cos, sin = angles.cos().float(), angles.sin().float()
        low, high = keys[..., : dim // 2], keys[..., dim // 2 :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1)

    with torch.inference_mode():
        pieces: dict[int, tuple[Any, int]] = {}  # by chunk: its KV, and where it was computed
        head = None
        for captured, numbers in zip(blends.captured, ((0, 1, 2), (3, 4, 5)), strict=True):
            kv = model(torch.tensor([captured.token_ids]), use_cache=True).past_key_values
            start = HEAD_TOKENS
            head = [(layer.keys[:, :, :start], layer.values[:, :, :start]) for layer in kv.layers]
            for number, end in zip(numbers, captured.chunk_ends, strict=True):
                part = [
                    (layer.keys[:, :, start:end], layer.values[:, :, start:end])
                    for layer in kv.layers
                ]
                pieces[number], start = (part, start), end
        assert head is not None
        cache, position = DynamicCache(), HEAD_TOKENS
        parts = [head]
        for number in (2, 3, 1):
            part, base = pieces[number]
            parts.append([(turned(keys, position - base), values) for keys, values in part])
            position += LENGTHS[number]
        for layer in range(model.config.num_hidden_layers):
            keys = torch.cat([part[layer][0] for part in parts], 2)
            values = torch.cat([part[layer][1] for part in parts], 2)
            cache.update(keys, values, layer)
        question = torch.tensor([prompt.token_ids[position:]])
        blended = model(question, past_key_values=cache).logits[0, -1]
        full = model(torch.tensor([prompt.token_ids])).logits[0, -1]
    return blended.log_softmax(-1).tolist(), full.log_softmax(-1).tolist()


@pytest.mark.parametrize(("budget", "order"), [(0.0, (4, 0, 2)), (0.3, (5, 2, 0))])
def test_what_is_not_exact_reaches_nobody_else(
    blends: Blends, budget: float, order: tuple[int, ...]
) -> None:
    prompt = prompt_of(*order, question="pollution")
    expected = blends.compute(prompt).token_ids
    answer, record = blends.blend(prompt, budget)
    assert record.blended_tokens > 0
    assert answer.token_ids != expected, "as it is not exact, it should show"
    # Without a plan, with an exact one, and blended in full.
    assert complete(blends.engine.url, prompt.token_ids, max_tokens=16).token_ids == expected
    assert blends.ask(prompt)[0].token_ids == expected
    assert blends.blend(prompt, 1.0)[0].token_ids == expected


def test_the_exact_head_is_shared_by_all(blends: Blends) -> None:
    blends.ask(prompt_of(0))
    for question in ("one", "two"):
        _, record = blends.blend(prompt_of(1, 5, question=question), 0.2)
        assert record.local_tokens == 256  # whole blocks of the head
        assert record.blended_tokens == LENGTHS[5] + LENGTHS[1]


def test_many_at_once_are_answered_as_they_are_alone(blends: Blends) -> None:
    """Batches of another shape round otherwise, in vLLM as well: so where the answer is clear."""
    orders = [(2, 0, 4), (1, 3), (4, 2, 0, 1), (0, 5, 3), (3, 1, 2), (5, 4, 0)]
    prompts = [clear_prompt(blends, order, max_tokens=2) for order in orders]
    expected = [blends.compute(prompt, max_tokens=2).token_ids for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: blends.blend(prompt, 1.0, 2), prompts))
    assert [answer.token_ids for answer, _ in found] == expected
    for _, record in found:
        assert 0 < record.blended_tokens == record.recomputed_tokens


def metric(blends: Blends, name: str, **labels: str) -> float:
    lines = httpx.get(f"{blends.engine.url}/metrics", timeout=5).text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(maxsplit=1)[1])
        for line in lines
        if line.startswith((f"{name}{{", f"{name} ")) and all(one in line for one in wanted)
    )


def test_the_engines_metrics_say_what_became_of_loads(blends: Blends) -> None:
    def counted(kind: str) -> float:
        return metric(blends, "ragcache_engine_prompt_tokens_total", kind=kind)

    before = {kind: counted(kind) for kind in ("exact", "blended", "repaired")}
    repairs = metric(blends, "ragcache_engine_repair_seconds_count")
    _, record = blends.blend(prompt_of(2, 4, question="counted"), 0.25)
    assert record.recomputed_tokens == int(0.25 * (LENGTHS[2] + LENGTHS[4]))
    deadline = time.monotonic() + 10
    while metric(blends, "ragcache_engine_repair_seconds_count") == repairs:
        assert time.monotonic() < deadline, "nothing is counted"
        time.sleep(0.1)
    found = {kind: counted(kind) - before[kind] for kind in before}
    assert found == {
        "exact": record.loaded_tokens - record.blended_tokens,
        "blended": record.blended_tokens - record.recomputed_tokens,
        "repaired": record.recomputed_tokens,
    }


def test_the_record_names_what_nothing_is_held_of(blends: Blends) -> None:
    unseen = ids("of which nothing is held", 70)
    prompt = assemble(ids("head", HEAD_TOKENS), [CHUNKS[1], unseen, CHUNKS[0]], ids("question", 23))
    _, record = blends.blend(prompt, 0.0)
    assert list(record.missing_chunks) == [2]  # of head, 1, unseen and 0
    assert record.recomputed_tokens == len(unseen)
    assert record.loaded_tokens == prompt.chunk_ends[-1] - record.local_tokens
    assert record.blended_tokens == LENGTHS[1] + len(unseen) + LENGTHS[0]


def test_a_damaged_chunk_is_computed(blends: Blends) -> None:
    # All of them: tests before this one may have had it computed behind other chunks, too.
    client = StoreClient(blends.store.address)
    chunk = blends.chunk_variants(blends.captured[1])[2].chunk
    [found] = client.lookup([LookupKey(chunk)], 30).variants
    client.close()
    blends.store.service.stop()
    for held in found.stored:
        corrupt(blends.folder / "store" / "data", held.key)
    blends.restart_store()
    prompt = prompt_of(1, DAMAGED, 0, question="damaged")
    deadline = time.monotonic() + 30
    while blends.blend(prompt_of(0, 2), 0.2)[1].miss in STORE_AWAY:
        assert time.monotonic() < deadline, "the engine does not find the store again"
    answer, record = blends.blend(prompt, 1.0)
    mended = LENGTHS[1] + LENGTHS[DAMAGED] + LENGTHS[0]
    assert (record.blended_tokens, record.recomputed_tokens) == (mended, mended)
    assert list(record.missing_chunks) == [2]  # of head, 1, DAMAGED and 0
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_clients_that_leave_at_any_moment_leave_nothing(blends: Blends) -> None:
    """Certainly in the middle of a load or of a repair: ``test_engine_interrupted``."""
    for number, seconds in enumerate((0.0, 0.01, 0.02, 0.03, 0.05, 0.08)):
        prompt = prompt_of(3, 2, 4, 0, 1, question=f"left {number}")
        body = _body(prompt, plan_blend(prompt, blends.space, "public", "left", 1.0).to_json())
        with httpx.stream("POST", f"{blends.engine.url}/v1/completions", json=body, timeout=30):
            time.sleep(seconds)
    deadline = time.monotonic() + 20
    while busy := blends.unfinished_requests():
        assert time.monotonic() < deadline, busy
        time.sleep(0.1)
    deadline = time.monotonic() + 20
    while blends_usage(blends) > 0:
        assert time.monotonic() < deadline, "blocks are not given back"
        time.sleep(0.1)


def blends_usage(blends: Blends) -> float:
    metrics = httpx.get(f"{blends.engine.url}/metrics", timeout=5).text.splitlines()
    [usage] = [line for line in metrics if line.startswith("vllm:kv_cache_usage_perc{")]
    return float(usage.rsplit(maxsplit=1)[1])


def _body(prompt: Prompt, plan: object) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": list(prompt.token_ids),
        "max_tokens": 2,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "kv_transfer_params": {"ragcache": plan},
    }


def lie(plan: dict[str, Any], rng: random.Random) -> None:
    """Change something about a plan that should not be so."""
    segments: list[dict[str, Any]] = plan["segments"]
    if not segments:
        return
    one = rng.choice(segments)
    match rng.randrange(8):
        case 0:
            one["chunk"] = rng.randbytes(16).hex()
        case 1:
            one["start"] += rng.randrange(-5, 6)
        case 2:
            one["end"] += rng.randrange(-5, 6)
        case 3:
            rng.shuffle(segments)
        case 4:
            one["action"] = rng.choice(["exact", "blend", "compute", "?", None])
        case 5:
            plan["recompute_share"] = rng.choice([-1, 2, "much", None, float(rng.random())])
        case 6:
            one["chunk"], other = rng.choice(segments)["chunk"], one["chunk"]
            segments[-1]["chunk"] = other
        case 7:
            plan["segments"] = rng.sample(segments, rng.randrange(len(segments)))


def equality_is_promised(space: KVSpace, plan: object, prompt: Prompt) -> bool:
    """Whether by its plan alone an answer has to be vLLM's own, whatever the store holds.

    It is unless the plan begins with segments that are the prompt's own, one of them to be blended.
    """
    try:
        parsed = ReusePlan.from_json(plan)
    except InvalidInput:
        return True
    honest = plan_exact(prompt, space, parsed.domain, "honest").segments
    for said, own in zip(parsed.segments, honest, strict=False):
        if (said.chunk, said.start, said.end) != (own.chunk, own.start, own.end):
            return True
        if said.action is not Action.EXACT:
            return said.action is Action.COMPUTE
    return True


def test_a_thousand_plans_that_may_lie_end_no_engine_and_change_no_answer(blends: Blends) -> None:
    """Whatever is not a blend by its plan, or by its record was mended in full, is vLLM's."""
    rng = random.Random(5)
    orders = ((2, 1, 0), (4, 3), (2, 4, 0), (5, 3, 1), (1,))
    pool_of = [clear_prompt(blends, order, max_tokens=2) for order in orders]
    expected = {p: blends.compute(p, max_tokens=2).token_ids for p in pool_of}

    def ask(number: int) -> str:
        """What came of it: promised by the plan, or by the record, or an answer of its own."""
        own = random.Random(number)
        prompt = own.choice(pool_of)
        name = f"plan {number}"
        given: dict[str, Any] = {"stream": False, "return_token_ids": True}
        # What is held as exact is blended no more, and vLLM's own cache comes first: so those that
        # would be saved as exact, and be there, have a domain for themselves.
        domain = "served as exact"
        if own.random() < 0.4:
            domain, given["cache_salt"] = "public", name
        if own.random() < 0.3:
            plan = plan_exact(prompt, blends.space, "served as exact", name).to_json()
        else:
            budget = own.choice([0.0, 0.2, 1.0])
            plan = plan_blend(prompt, blends.space, domain, name, budget).to_json()
        for _ in range(own.randrange(3)):
            lie(plan, own)
        prompts = [prompt]
        if own.random() < 0.05:
            # As good as greedy, which is refused for two: what is clear is clear by more than this.
            given |= {"n": 2, "temperature": 0.01}
        if own.random() < 0.05:
            prompts.append(own.choice(pool_of))
            given["prompt"] = [list(one.token_ids) for one in prompts]
        url = f"{blends.engine.url}/v1/completions"
        reply = httpx.post(url, json=_body(prompt, plan) | given, timeout=120)
        said = json.dumps(plan)
        assert reply.status_code == 200, (reply.text, said)
        each = given.get("n", 1)
        asked = [one for one in prompts for _ in range(each)]
        choices = sorted(reply.json()["choices"], key=lambda choice: choice["index"])
        answers = [tuple(choice["token_ids"]) for choice in choices]
        assert list(map(len, answers)) == [2] * len(asked)
        wrong = [
            (one, answer)
            for one, answer in zip(asked, answers, strict=True)
            if equality_is_promised(blends.space, plan, one) and answer != expected[one]
        ]
        assert not wrong, (wrong, said)
        if all(equality_is_promised(blends.space, plan, one) for one in asked):
            return "by its plan"
        if len(asked) > 1:  # of which there is one record
            return "several"
        record = blends.record(name)
        if record.recomputed_tokens < record.blended_tokens:
            return "blended"
        assert answers == [expected[prompt]], (record, said)
        return "mended in full" if record.blended_tokens else "by its record"

    with ThreadPoolExecutor(8) as pool:
        ends = Counter(pool.map(ask, (rng.randrange(1 << 30) for _ in range(1000))))
    assert ends["by its plan"] > 300, ends
    assert min(ends["blended"], ends["mended in full"], ends["by its record"]) > 20, ends
    for prompt, tokens in expected.items():
        assert complete(blends.engine.url, prompt.token_ids, max_tokens=2).token_ids == tokens
