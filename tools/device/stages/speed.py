"""Engine B: the shape of a 3B model, compiled, with CUDA graphs. How fast is it?

::

    python -m tools.device.stages.speed --device cuda --folder DIR [--wait-for FILE]

Requests are answered one at a time, in interleaved rounds; figures are medians.
"""

from __future__ import annotations

import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from ragcache_core.plan.prompt import Prompt
from ragcache_core.plan.reuse_plan import ReusePlan
from tools.device.chosen_tier import DEVICE, HOST, STORE, ChosenTier, install_tiers
from tools.device.decoding import decoding
from tools.device.engine import (
    GIB,
    Answer,
    InProcessEngine,
    Options,
    engine_arguments,
    running_engine,
)
from tools.device.packages import ROOT
from tools.device.prompts import Scene
from tools.device.random_model import VOCABULARY, make_model
from tools.device.report import NOT_BUILT, require, run_stage

TINYRAG = ROOT / "models" / "tinyrag" / "model"
LENGTHS: Final = {"cuda": (2048, 8192), "cpu": (256, 512)}
CHUNK_TOKENS: Final = {"cuda": 250, "cpu": 80}
ROUNDS: Final = {"cuda": 7, "cpu": 2}
WARM_UP: Final = 2
SHARE: Final = 0.15
DECODING: Final = 8
DECODED_TOKENS: Final = {"cuda": 1000, "cpu": 500}
PROFILED_STEPS: Final = 20
STEPS_ALONE: Final = 24
MAX_GAP_MS: Final = 20.0
"""Most that a load may add to the longest pause between two tokens of other requests."""

TURN_S: Final = 300.0


class Speed:
    """The measurements."""

    def __init__(self, engine: InProcessEngine, tiers: ChosenTier, device: str) -> None:
        self.engine, self.tiers, self.device = engine, tiers, device
        vocabulary = VOCABULARY if device == "cuda" else 2438
        self.scenes = {
            length: Scene.make(length, (length - 96) // CHUNK_TOKENS[device], vocabulary, length)
            for length in LENGTHS[device]
        }

    def fill_store(self) -> dict[str, Any]:
        """Compute, store and observe all chunks."""
        self.tiers.choose(STORE)
        found = {}
        for length, scene in self.scenes.items():
            started = time.perf_counter()
            for number in range(2):
                prompt = scene.captured(number)
                self.engine.ask(prompt, self.engine.blend_plan(prompt, 0.0))
                self.engine.wait_until_stored(prompt, observed=True)
            found[str(length)] = round(time.perf_counter() - started, 2)
        return {"seconds_until_stored": found}

    def fill_tier(self, tier: str) -> dict[str, Any]:
        """Load all chunks into one of the engine's own tiers."""
        found = {length: self._fill_tier(tier, scene) for length, scene in self.scenes.items()}
        return {"loads_until_filled": found}

    def first_token(self, length: int) -> dict[str, Any]:
        """Measure the time to first token by each way."""
        scene = self.scenes[length]
        taken: defaultdict[str, list[float]] = defaultdict(list)
        parts: defaultdict[str, list[tuple[float, float, float]]] = defaultdict(list)
        failed: dict[str, str] = {}
        for number in range(WARM_UP + ROUNDS[self.device]):
            for name, way in self._ways(scene, f"round {number}").items():
                if name in failed:
                    continue
                try:
                    answer, plan = way()
                except (AssertionError, TimeoutError) as error:
                    failed[name] = str(error)
                    continue
                if number >= WARM_UP:
                    taken[name].append(answer.ttft_s * 1e3)
                    if plan is not None:
                        record = self.engine.record(plan)
                        moved = record.load_s - record.recompute_s
                        parts[name].append((record.queue_s, moved, record.recompute_s))
        medians = {name: round(statistics.median(times), 2) for name, times in taken.items()}
        return {
            "ttft_ms": medians | {"store_registered": NOT_BUILT, "blend15_merged": NOT_BUILT},
            "least_ms": {name: round(min(times), 2) for name, times in taken.items()},
            "queue_load_recompute_ms": {
                name: [round(statistics.median(part) * 1e3, 2) for part in zip(*times, strict=True)]
                for name, times in parts.items()
            },
            "full_over": {
                name: round(medians["full"] / ms, 2)
                for name, ms in medians.items()
                if name != "full"
            },
            "load_not_slower": {
                name: medians[name] <= medians["full"]
                for name in (STORE, HOST, DEVICE)
                if name in medians
            },
            **({"passed": False, "error": str(failed)} if failed else {}),
        }

    def gaps(self) -> dict[str, Any]:
        """Measure the time between two tokens of eight requests while another one begins."""
        scene, device = self.scenes[LENGTHS[self.device][0]], self.device
        self.tiers.choose(STORE)
        worst: defaultdict[str, list[float]] = defaultdict(list)
        usual: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(1 + max(2, ROUNDS[device] // 2)):
            with decoding(self.engine, DECODING, DECODED_TOKENS[device]) as others:
                for name, case in self._cases(scene, f"gap {number}").items():
                    others.take_gaps_s()
                    if case is None:
                        others.run(STEPS_ALONE)
                    else:
                        others.answer(*case)
                    gaps_s = others.take_gaps_s()
                    if number:
                        worst[name].append(max(gaps_s) * 1e3)
                        usual[name].append(statistics.median(gaps_s) * 1e3)
        found = {
            name: {
                "worst_ms": round(statistics.median(worst[name]), 2),
                "median_ms": round(statistics.median(usual[name]), 2),
            }
            for name in worst
        }
        added = found["store"]["worst_ms"] - found["alone"]["worst_ms"]
        return {"gaps": found, "load_adds_ms": round(added, 2), "gap_within": added <= MAX_GAP_MS}

    def host_waits(self) -> dict[str, Any]:
        """Count waits for the GPU, copies and launches in steps of eight decoding requests."""
        scene, device = self.scenes[LENGTHS[self.device][0]], self.device
        self.tiers.choose(STORE)
        found: dict[str, Any] = {"in_steps": PROFILED_STEPS}
        with decoding(self.engine, DECODING, DECODED_TOKENS[device]) as others:
            for name, case in self._cases(scene, "profiled").items():
                token_ids, plan = case or ((), None)
                found[name] = others.profile(PROFILED_STEPS, token_ids, plan)
        return found

    def _cases(
        self, scene: Scene, name: str
    ) -> dict[str, tuple[Sequence[int], ReusePlan | None] | None]:
        """Return what begins while others decode: nothing, or a request with its plan."""
        exact, blended = scene.captured(0, name), scene.blended(name)
        return {
            "alone": None,
            "computed": (exact.token_ids, None),
            "store": (exact.token_ids, self.engine.exact_plan(exact)),
            "blend15": (blended.token_ids, self.engine.blend_plan(blended, SHARE)),
        }

    def end(self) -> dict[str, Any]:
        """Report memory of the GPU."""
        if self.device != "cuda":
            return {"peak_bytes": 0, "out_of_memory": 0}
        import torch  # noqa: PLC0415

        stats = torch.cuda.memory_stats()
        return {
            "peak_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "out_of_memory": stats["num_ooms"],
            "retries": stats["num_alloc_retries"],
        }

    def _ways(
        self, scene: Scene, name: str
    ) -> dict[str, Callable[[], tuple[Answer, ReusePlan | None]]]:
        exact, blended = scene.captured(0, name), scene.blended(name)

        def prefix_hit() -> tuple[Answer, None]:
            salt = f"prefix {name} {len(exact.token_ids)}"
            self.engine.ask(exact, salt=salt)
            return self.engine.ask(scene.captured(0, f"{name} again"), salt=salt), None

        def planned(tier: str, prompt: Prompt, share: float | None) -> tuple[Answer, ReusePlan]:
            self.tiers.choose(tier)
            plan = self._plan(prompt, share)
            answer = self.engine.ask(prompt, plan)
            self._check_source(plan, tier)
            return answer, plan

        return {
            "full": lambda: (self.engine.ask(exact), None),
            "prefix_hit": prefix_hit,
            STORE: lambda: planned(STORE, exact, None),
            HOST: lambda: planned(HOST, exact, None),
            DEVICE: lambda: planned(DEVICE, exact, None),
            "blend15": lambda: planned(STORE, blended, SHARE),
            "blend15_device": lambda: planned(DEVICE, blended, SHARE),
        }

    def _plan(self, prompt: Prompt, share: float | None) -> ReusePlan:
        if share is None:
            return self.engine.exact_plan(prompt)
        return self.engine.blend_plan(prompt, share)

    def _check_source(self, plan: ReusePlan, tier: str) -> None:
        record, wrong = self.engine.record(plan), self.tiers.not_found
        if tier == STORE:
            wrong = self.tiers.found
        require(record.miss == "" and not wrong, f"{tier}: {record.miss}, {wrong} from elsewhere")
        require(
            record.loaded_tokens >= 0.9 * record.prompt_tokens - 256,
            f"{tier}: only {record.loaded_tokens} of {record.prompt_tokens} tokens were loaded",
        )

    def _fill_tier(self, tier: str, scene: Scene) -> int:
        """Load both captured prompts until nothing comes from the store; return how often."""
        for number in range(1, 40):
            self.tiers.choose(tier)
            for captured in range(2):
                prompt = scene.captured(captured, f"fill {tier} {number}")
                self.engine.ask(prompt, self.engine.exact_plan(prompt))
            if self.tiers.found and not self.tiers.not_found:
                return number
            time.sleep(0.1)  # a thread in the background copies
        raise TimeoutError(f"the tier {tier} does not keep what it has loaded")


def _wait_for(turn: Path | None) -> None:
    """Wait until no other program uses the GPU."""
    deadline = time.monotonic() + TURN_S
    while turn is not None and not turn.exists() and time.monotonic() < deadline:
        time.sleep(0.2)


def main() -> int:
    """Run the stages."""
    parser = engine_arguments()
    parser.add_argument("--wait-for", type=Path, help="file that exists once measuring may begin")
    given = parser.parse_args()
    on_gpu = given.device == "cuda"
    model = make_model(given.folder / "model", TINYRAG) if on_gpu else TINYRAG
    longest = max(LENGTHS[given.device])
    options = Options(
        model=model,
        folder=given.folder,
        device=given.device,
        eager=given.no_compile or not on_gpu,
        max_length=longest + 1024 if on_gpu else 2048,
        pass_tokens=8192 if on_gpu else 2048,
        kv_bytes=8 * GIB,
        store_bytes=(12 if on_gpu else 1) * GIB,
        shared_memory=True,
        attention=given.attention,
        settings={
            "RAGCACHE_HOST_TIER_BYTES": str((6 if on_gpu else 1) * GIB),
            "RAGCACHE_DEVICE_POOL_BYTES": str((6 if on_gpu else 1) * GIB),
        },
    )
    made = install_tiers()
    started: list[InProcessEngine] = []
    context = running_engine(options)

    def start() -> dict[str, Any]:
        started.append(context.__enter__())
        return started[0].facts()

    if not run_stage("engine B: start", start):
        return 3
    speed = Speed(started[0], made[0], given.device)
    _wait_for(given.wait_for)
    run_stage("engine B: fill the store", speed.fill_store)
    for tier in (HOST, DEVICE):
        run_stage(f"engine B: fill the {tier} tier", partial(speed.fill_tier, tier))
    for length in LENGTHS[given.device]:
        run_stage(f"engine B: first token, {length}", partial(speed.first_token, length))
    run_stage("engine B: eight others decode", speed.gaps)
    run_stage("engine B: host waits", speed.host_waits)
    run_stage("engine B: memory", speed.end)

    def end() -> dict[str, Any]:
        context.__exit__(None, None, None)
        return {"threads": sorted(t.name for t in threading.enumerate() if not t.daemon)}

    run_stage("engine B: shutdown", end)
    sys.stdout.flush()
    os._exit(0)  # threads of vLLM's compiler would delay the end


if __name__ == "__main__":
    sys.exit(main())
