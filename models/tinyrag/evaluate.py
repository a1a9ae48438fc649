"""Measures exact match of the bundled model through vLLM on names it was never trained on.

    python models/tinyrag/evaluate.py --quick

Every question has a prompt of its own: eight documents of a fresh handbook in random order, cut
into chunks as the retriever does, at least three of which state the asked attribute. The last
line printed is one JSON object; its `single`, `two_step` and `absent` are shares of answers that
equal the right one character for character.
"""

import argparse
import json
import os
import secrets
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from transformers import AutoTokenizer

if not __package__:  # run as a script
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from models.tinyrag.examples import Scene, ask, stage_scene
from models.tinyrag.handbook import KINDS, Kind, Question
from models.tinyrag.prompt import prompt_ids

MODEL = Path(__file__).resolve().parent / "model"
QUICK, FULL = 200, 500
"""Questions of each kind."""
SHARED = 3
"""At least so many of the documents state the asked attribute."""
MAX_ANSWER_TOKENS = 32


@dataclass(frozen=True)
class Case:
    """A question and the token ids of its prompt."""

    question: Question
    prompt: list[int]


def draw_cases(
    rng: Random, kind: Kind, count: int, documents: int, count_tokens: Callable[[str], int]
) -> list[tuple[Scene, Question]]:
    """`count` questions of a kind, each with the scene it is asked about."""
    cases: list[tuple[Scene, Question]] = []
    while len(cases) < count:
        scene = stage_scene(rng, "held_out", documents, count_tokens)
        question = ask(rng, scene.documents, "held_out", kind)
        if question is None:
            continue
        sharing = sum(question.attribute in d.facts for d in scene.documents)
        if sharing >= min(SHARED, documents):
            cases.append((scene, question))
    return cases


def evaluate(model: Path, seed: int, per_kind: int, documents: int) -> dict[str, object]:
    """Asks `per_kind` questions of each kind; returns the object that `main` prints."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams  # noqa: PLC0415 (reads the variable above)

    tokenizer = AutoTokenizer.from_pretrained(model)

    def count_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    rng = Random(seed)
    cases = [
        Case(question, prompt_ids(tokenizer, _chunks(scene), question.text))
        for kind in KINDS
        for scene, question in draw_cases(rng, kind, per_kind, documents, count_tokens)
    ]
    engine = LLM(str(model), enforce_eager=True, disable_log_stats=True)
    outputs = engine.generate(
        [{"prompt_token_ids": case.prompt} for case in cases],
        SamplingParams(temperature=0, max_tokens=MAX_ANSWER_TOKENS),
        use_tqdm=False,
    )
    right: Counter[str] = Counter()
    asked: Counter[str] = Counter()
    for case, output in zip(cases, outputs, strict=True):
        groups = [str(case.question.kind)]
        if case.question.kind == "single":
            groups.append("single_late" if case.question.needs_earlier_chunk else "single_early")
        for group in groups:
            asked[group] += 1
            right[group] += output.outputs[0].text == case.question.answer
    lengths = [len(case.prompt) for case in cases]
    return {
        **{group: round(right[group] / asked[group], 4) for group in sorted(asked)},
        "questions_per_kind": per_kind,
        "documents": documents,
        "prompt_tokens": {"mean": round(sum(lengths) / len(lengths)), "max": max(lengths)},
        "seed": seed,
    }


def _chunks(scene: Scene) -> list[str]:
    return [chunk.text for chunks in scene.chunks for chunk in chunks]


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description="Measure the bundled model through vLLM.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} questions of each kind")
    parser.add_argument(
        "--seed", type=int, help="repeat an earlier run; otherwise a new one is drawn"
    )
    parser.add_argument("--documents", type=int, default=8, help="documents in each prompt")
    parser.add_argument("--model", type=Path, default=MODEL)
    args = parser.parse_args()
    seed = secrets.randbits(32) if args.seed is None else args.seed
    print(f"seed {seed}", flush=True)
    per_kind = QUICK if args.quick else FULL
    print(json.dumps(evaluate(args.model, seed, per_kind, args.documents)), flush=True)


if __name__ == "__main__":
    main()
