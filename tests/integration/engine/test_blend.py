"""Prompts with chunks of other prompts, in a real vLLM server with a real store."""

from __future__ import annotations

import itertools
import json
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.completion import Completion, complete, is_clear
from harness.plans import blend_for_all, exact_for_all
from harness.processes import COMPUTES_PLAIN, launch_engine, start_cachestore, wait_for_engine
from harness.stored_values import corrupt
from ragcache_core.blend.observation import observation_key
from ragcache_core.errors import InvalidInput
from ragcache_core.identity.keys import KVSpace, VariantKey
from ragcache_core.plan.prompt import Prompt, assemble
from ragcache_core.plan.reuse_plan import Action, ReusePlan
from ragcache_core.store_api import LookupKey
from ragcache_kv.model.folder import load_model_folder
from ragcache_kv.store_client.client import StoreClient
from ragcache_wire.v1 import engine_pb2
from tests.integration.engine.test_vllm import VOCABULARY, Platform
from tests.kit.wait import wait_until

pytestmark = pytest.mark.timeout(900)

# Smaller than a prompt, so that its computation and its recomputation take several passes.
ENGINE_ARGUMENTS = ("--max-num-batched-tokens", "384")
TEMPLATE_TOKENS = 300
LENGTHS = (131, 200, 177, 91, 150, 64)
DAMAGED = 5  # chunk with a damaged value


def ids(name: str, count: int) -> list[int]:
    rng = random.Random(name)
    return [rng.randrange(VOCABULARY) for _ in range(count)]


CHUNKS = [ids(f"chunk {n}", length) for n, length in enumerate(LENGTHS)]


def make_blend_prompt(
    *chunks: int, template: int = TEMPLATE_TOKENS, question: str = "question"
) -> Prompt:
    return assemble(ids("head", template), [CHUNKS[n] for n in chunks], ids(question, 23))


@dataclass
class Blends(Platform):
    """captured: the prompts in which the chunks were computed."""

    captured: list[Prompt] = field(default_factory=list)

    def blend(
        self, prompt: Prompt, recompute_share: float, max_tokens: int = 16
    ) -> tuple[Completion, engine_pb2.RequestRecord]:
        request = uuid.uuid4().hex
        plan = blend_for_all(prompt, self.space, "public", request, recompute_share).encode()
        answer = complete(self.engine.url, prompt.token_ids, max_tokens=max_tokens, plan=plan)
        return answer, self.record(request)

    def ask_uncached(self, prompt: Prompt) -> tuple[Completion, engine_pb2.RequestRecord]:
        """Ask with an exact plan, and without vLLM's own prefix cache."""
        request = uuid.uuid4().hex
        plan = exact_for_all(prompt, self.space, "public", request).encode()
        salt = uuid.uuid4().hex
        answer = complete(
            *(self.engine.url, prompt.token_ids), max_tokens=16, plan=plan, cache_salt=salt
        )
        return answer, self.record(request)

    def chunk_variants(self, prompt: Prompt) -> list[VariantKey]:
        return self.keys(prompt)[1:]


def clear_prompt(blends: Blends, order: tuple[int, ...], max_tokens: int) -> Prompt:
    """Return a prompt with these chunks whose answer does not depend on rounding."""
    return next(
        prompt
        for prompt in (make_blend_prompt(*order, question=f"clear {n}") for n in itertools.count())
        if is_clear(blends.engine.url, prompt, max_tokens)
    )


@pytest.fixture(scope="module")
def blends(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Blends]:
    """A store with every chunk, computed and observed in two prompts."""
    folder = tmp_path_factory.mktemp("blends")
    store = start_cachestore(folder / "store")
    space = load_model_folder(str(tiny_model)).space("auto")
    engine = launch_engine(
        *(folder, tiny_model, store.address, *ENGINE_ARGUMENTS), settings=COMPUTES_PLAIN
    )
    captured = [make_blend_prompt(0, 1, 2), make_blend_prompt(3, 4, 5)]
    blends = Blends(folder, tiny_model, store, engine, space, captured)
    try:
        wait_for_engine(engine)
        client = StoreClient(store.address)
        for prompt in captured:
            blends.blend(prompt, 0.0)
            blends.wait_until_stored(prompt)
            wants = [
                LookupKey.for_variant(observation_key(key)) for key in blends.chunk_variants(prompt)
            ]
            wait_until(
                lambda: all(found.stored for found in client.lookup(wants, 60).variants),  # noqa: B023
                "chunks are not observed",
            )
        client.close()
        yield blends
    finally:
        blends.engine.service.stop()
        blends.store.service.stop()


@pytest.mark.parametrize("order", [(2, 0, 1), (4, 1, 3, 0), (1, 5), (2, 3, 4, 0, 1)])
def test_a_fully_recomputed_blend_equals_a_full_computation(
    blends: Blends, order: tuple[int, ...]
) -> None:
    prompt = make_blend_prompt(*order)
    answer, record = blends.blend(prompt, 1.0)
    context = prompt.chunk_ends[-1] - TEMPLATE_TOKENS
    assert (record.blended_tokens, record.recomputed_tokens, record.miss) == (context, context, "")
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_a_blend_without_recomputation_equals_another_implementation(blends: Blends) -> None:
    """Rotated keys in sequence, by transformers in float32."""
    prompt = make_blend_prompt(2, 3, 1)
    request = uuid.uuid4().hex
    body = {
        "model": "model",
        "prompt": list(prompt.token_ids),
        "max_tokens": 1,
        "temperature": 0,
        "logprobs": 10,
        "return_tokens_as_token_ids": True,
        "kv_transfer_params": {
            "ragcache": blend_for_all(prompt, blends.space, "public", request, 0.0).encode()
        },
    }
    reply = httpx.post(f"{blends.engine.url}/v1/completions", json=body, timeout=60).json()
    record = blends.record(request)
    assert (record.blended_tokens, record.recomputed_tokens) == (468, 0)
    [said] = reply["choices"][0]["logprobs"]["top_logprobs"]
    found = {int(token.removeprefix("token_id:")): value for token, value in said.items()}
    wanted, full = reference(blends, prompt)
    error = max(abs(found[token] - wanted[token]) for token in found)
    # The blend is close to the reference, and far from a full computation. vLLM computes in
    # bfloat16, whose error depends on the processor: 0.17 without AVX-512.
    assert error < 0.25, (found, [wanted[token] for token in found])
    assert max(abs(found[token] - full[token]) for token in found) > 3 * error


def reference(blends: Blends, prompt: Prompt) -> tuple[list[float], list[float]]:
    """Return the log-probabilities of the next token: of the blend, and of a full computation."""
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
        pieces: dict[int, tuple[Any, int]] = {}  # by chunk: its KV and position
        head = None
        for captured, numbers in zip(blends.captured, ((0, 1, 2), (3, 4, 5)), strict=True):
            kv = model(torch.tensor([captured.token_ids]), use_cache=True).past_key_values
            start = TEMPLATE_TOKENS
            head = [(layer.keys[:, :, :start], layer.values[:, :, :start]) for layer in kv.layers]
            for number, end in zip(numbers, captured.chunk_ends, strict=True):
                part = [
                    (layer.keys[:, :, start:end], layer.values[:, :, start:end])
                    for layer in kv.layers
                ]
                pieces[number], start = (part, start), end
        assert head is not None
        cache, position = DynamicCache(), TEMPLATE_TOKENS
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


@pytest.mark.parametrize(("recompute_share", "order"), [(0.0, (4, 0, 2)), (0.3, (5, 2, 0))])
def test_blended_kv_reaches_no_other_request(
    blends: Blends, recompute_share: float, order: tuple[int, ...]
) -> None:
    prompt = make_blend_prompt(*order, question="pollution")
    expected = blends.compute(prompt).token_ids
    answer, record = blends.blend(prompt, recompute_share)
    assert record.blended_tokens > 0
    assert answer.token_ids != expected, "the blend is not exact, so its answer differs"
    # Without a plan, with an exact plan, and with a fully recomputed blend.
    assert complete(blends.engine.url, prompt.token_ids, max_tokens=16).token_ids == expected
    assert blends.ask(prompt)[0].token_ids == expected
    assert blends.blend(prompt, 1.0)[0].token_ids == expected


def test_the_exact_template_is_shared(blends: Blends) -> None:
    blends.ask(make_blend_prompt(0))
    for question in ("one", "two"):
        _, record = blends.blend(make_blend_prompt(1, 5, question=question), 0.2)
        assert record.local_tokens == 256  # full blocks of the template
        assert record.blended_tokens == LENGTHS[5] + LENGTHS[1]


def test_concurrent_requests_get_the_same_answers_as_single_ones(blends: Blends) -> None:
    """Batches of another shape round differently in vLLM, so the prompts have clear answers."""
    orders = [(2, 0, 4), (1, 3), (4, 2, 0, 1), (0, 5, 3), (3, 1, 2), (5, 4, 0)]
    prompts = [clear_prompt(blends, order, max_tokens=2) for order in orders]
    expected = [blends.compute(prompt, max_tokens=2).token_ids for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda prompt: blends.blend(prompt, 1.0, 2), prompts))
    assert [answer.token_ids for answer, _ in found] == expected
    for _, record in found:
        # Fewer where another of these requests has just stored a chunk after a similar prefix.
        assert 0 < record.recomputed_tokens <= record.blended_tokens


def metric(blends: Blends, name: str, **labels: str) -> float:
    lines = httpx.get(f"{blends.engine.url}/metrics", timeout=60).text.splitlines()
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(
        float(line.rsplit(maxsplit=1)[1])
        for line in lines
        if line.startswith((f"{name}{{", f"{name} ")) and all(one in line for one in wanted)
    )


def test_metrics_count_the_tokens_of_a_load(blends: Blends) -> None:
    def counted(kind: str) -> float:
        return metric(blends, "ragcache_engine_prompt_tokens_total", kind=kind)

    before = {kind: counted(kind) for kind in ("exact", "blended", "recomputed")}
    recomputations = metric(blends, "ragcache_engine_recompute_seconds_count")
    _, record = blends.blend(make_blend_prompt(2, 4, question="counted"), 0.25)
    assert record.recomputed_tokens == int(0.25 * (LENGTHS[2] + LENGTHS[4]))
    wait_until(
        lambda: metric(blends, "ragcache_engine_recompute_seconds_count") != recomputations,
        "the recomputation is not counted",
    )
    found = {kind: counted(kind) - before[kind] for kind in before}
    assert found == {
        "exact": record.loaded_tokens - record.blended_tokens,
        "blended": record.blended_tokens - record.recomputed_tokens,
        "recomputed": record.recomputed_tokens,
    }


def test_the_record_lists_missing_chunks(blends: Blends) -> None:
    unseen = ids("unseen", 70)
    prompt = assemble(
        ids("head", TEMPLATE_TOKENS), [CHUNKS[1], unseen, CHUNKS[0]], ids("question", 23)
    )
    _, record = blends.blend(prompt, 0.0)
    assert list(record.missing_chunks) == [2]  # of template, 1, unseen and 0
    assert record.recomputed_tokens == len(unseen)
    assert record.loaded_tokens == prompt.chunk_ends[-1] - record.local_tokens
    assert record.blended_tokens == LENGTHS[1] + len(unseen) + LENGTHS[0]


def test_a_damaged_chunk_is_recomputed(blends: Blends) -> None:
    # All of its variants: earlier tests may have computed it after other chunks, too.
    client = StoreClient(blends.store.address)
    chunk = blends.chunk_variants(blends.captured[1])[2].chunk
    [found] = client.lookup([LookupKey(chunk)], 30).variants
    client.close()
    blends.store.service.stop()
    for held in found.stored:
        corrupt(blends.folder / "store" / "data", held.key)
    blends.restart_store()
    prompt = make_blend_prompt(1, DAMAGED, 0, question="damaged")
    # Each of the engine's processes reconnects by itself: one looks up, the other loads.
    whole = blends.captured[0]
    wait_until(
        lambda: blends.ask_uncached(whole)[1].loaded_tokens >= whole.chunk_ends[-1],
        "a connection to the store",
    )
    answer, record = blends.blend(prompt, 1.0)
    context = LENGTHS[1] + LENGTHS[DAMAGED] + LENGTHS[0]
    assert (record.blended_tokens, record.recomputed_tokens) == (context, context)
    assert list(record.missing_chunks) == [2]  # of template, 1, DAMAGED and 0
    assert answer.token_ids == blends.compute(prompt).token_ids


def test_clients_that_disconnect_at_any_time_leave_no_blocks(blends: Blends) -> None:
    """See ``test_interrupted`` for clients that disconnect in the middle of a load."""
    for number, seconds in enumerate((0.0, 0.01, 0.02, 0.03, 0.05, 0.08)):
        prompt = make_blend_prompt(3, 2, 4, 0, 1, question=f"left {number}")
        body = _body(prompt, blend_for_all(prompt, blends.space, "public", "left", 1.0).encode())
        with httpx.stream("POST", f"{blends.engine.url}/v1/completions", json=body, timeout=60):
            time.sleep(seconds)
    wait_until(lambda: not blends.unfinished_requests())
    wait_until(lambda: blends_usage(blends) <= 0, "blocks are not free")


def blends_usage(blends: Blends) -> float:
    metrics = httpx.get(f"{blends.engine.url}/metrics", timeout=60).text.splitlines()
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


def falsify(plan: ReusePlan, rng: random.Random) -> ReusePlan:
    """Make a plan wrong in one way."""
    segments = list(plan.segments)
    if not segments:
        return plan
    index = rng.randrange(len(segments))
    one = segments[index]
    match rng.randrange(8):
        case 0:
            segments[index] = replace(one, chunk=rng.randbytes(16))
        case 1:
            segments[index] = replace(one, start=max(0, one.start + rng.randrange(-5, 6)))
        case 2:
            segments[index] = replace(one, end=max(0, one.end + rng.randrange(-5, 6)))
        case 3:
            rng.shuffle(segments)
        case 4:
            segments[index] = replace(one, action=rng.choice(list(Action)))
        case 5:
            plan = replace(plan, recompute_share=rng.choice([-1.0, 2.0, rng.random()]))
        case 6:
            other = rng.choice(segments)
            segments[index] = replace(one, chunk=other.chunk)
            segments[-1] = replace(segments[-1], chunk=one.chunk)
        case 7:
            segments = rng.sample(segments, rng.randrange(len(segments)))
    return replace(plan, segments=tuple(segments))


def damage(plan: str, rng: random.Random) -> str:
    """Change one character of an encoded plan, or leave some out."""
    index = rng.randrange(len(plan))
    return plan[:index] + rng.choice(["A", "_", "", "é"]) + plan[index + rng.randrange(2) :]


def guarantees_equality(space: KVSpace, plan: object, prompt: Prompt) -> bool:
    """Tell whether a plan alone guarantees vLLM's own answer, with any contents of the store.

    Only a plan that begins with the prompt's own segments, and blends one of them, does not.
    """
    try:
        parsed = ReusePlan.decode(plan)
    except InvalidInput:
        return True
    own_plan = exact_for_all(prompt, space, parsed.domain, "own_plan").segments
    for said, own in zip(parsed.segments, own_plan, strict=False):
        if (said.chunk, said.start, said.end) != (own.chunk, own.start, own.end):
            return True
        if said.action is not Action.EXACT:
            return said.action is Action.COMPUTE
    return True


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.slow)])
def test_wrong_plans_end_no_engine_and_change_no_exact_answer(blends: Blends, count: int) -> None:
    """Answers without a blend, and of fully recomputed blends, equal those of vLLM."""
    rng = random.Random(5)
    orders = ((2, 1, 0), (4, 3), (2, 4, 0), (5, 3, 1), (1,))
    pool_of = [clear_prompt(blends, order, max_tokens=2) for order in orders]
    expected = {p: blends.compute(p, max_tokens=2).token_ids for p in pool_of}

    def ask(number: int) -> str:
        """Ask once. Return which check applied: by the plan, by the record, or none."""
        own = random.Random(number)
        prompt = own.choice(pool_of)
        name = f"plan {number}"
        given: dict[str, Any] = {"stream": False, "return_token_ids": True}
        # A chunk with an exact variant is not blended, and vLLM's own cache comes first. So
        # requests that save exact variants have an access domain of their own.
        domain = "served as exact"
        if own.random() < 0.4:
            domain, given["cache_salt"] = "public", name
        if own.random() < 0.3:
            reuse = exact_for_all(prompt, blends.space, "served as exact", name)
        else:
            recompute_share = own.choice([0.0, 0.2, 1.0])
            reuse = blend_for_all(prompt, blends.space, domain, name, recompute_share)
        for _ in range(own.randrange(3)):
            reuse = falsify(reuse, own)
        plan = reuse.encode()
        if own.random() < 0.1:
            plan = damage(plan, own)
        prompts = [prompt]
        if own.random() < 0.05:
            # Almost greedy, which vLLM refuses for two answers. Clear answers do not change.
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
            if guarantees_equality(blends.space, plan, one) and answer != expected[one]
        ]
        assert not wrong, (wrong, said)
        if all(guarantees_equality(blends.space, plan, one) for one in asked):
            return "by its plan"
        if len(asked) > 1:  # they share one record
            return "several"
        record = blends.record(name)
        if record.recomputed_tokens < record.blended_tokens:
            return "blended"
        assert answers == [expected[prompt]], (record, said)
        return "fully recomputed" if record.blended_tokens else "by its record"

    with ThreadPoolExecutor(8) as pool:
        ends = Counter(pool.map(ask, (rng.randrange(1 << 30) for _ in range(count))))
    assert ends["by its plan"] > 0.3 * count, ends
    assert min(ends["blended"], ends["fully recomputed"], ends["by its record"]) > 0.02 * count, (
        ends
    )
    for prompt, tokens in expected.items():
        assert complete(blends.engine.url, prompt.token_ids, max_tokens=2).token_ids == tokens
