"""What several schedulers share, and what ends them: directories, memory that runs short, restarts, kills.

As in ``test_omlx_scheduler.py``, every logit is compared with that of a run without a cache.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import EXAMPLES, child_environment, long, make_tiny_llama
from omlx_families import (
    BLOCK,
    FAMILIES,
    Family,
    Shadow,
    assert_at_rest,
    most_families,
    opened,
    text,
    two_families,
)
from omlx_scheduler import Scheduler

from prefixcache.paged_ssd_cache import SharedHotCacheBudget

HERE = Path(__file__).resolve().parent


@pytest.fixture(scope="module", autouse=True)
def no_compiler() -> Iterator[None]:
    """On a CPU, MLX calls the system's compiler for each function that a model wants to be compiled: seconds each."""
    mx.disable_compile()
    yield
    mx.enable_compile()


class TestManyModels:
    def test_a_second_model_in_the_directory(self, tmp_path: Path) -> None:
        """Of other layers, and of the same layers with other weights; both at once, and after a restart."""
        models = {
            "one": make_tiny_llama(),
            "two": make_tiny_llama(seed=8),
            "three": FAMILIES["states and rows"].model,
        }
        shadows = {name: Shadow(model, 16) for name, model in models.items()}
        prompt = text(5 * 16 + 3)
        for found in (0, 80):
            engines = {name: Scheduler(model, tmp_path, model_name=name) for name, model in models.items()}
            for name, engine in engines.items():
                assert shadows[name].serve(engine, prompt, text(4, seed=1)) == found
            for name, engine in engines.items():
                assert shadows[name].serve(engine, [*prompt, 1]) == 80
                assert_at_rest(engine)
            for engine in engines.values():
                engine.close()

    @pytest.mark.parametrize("draft", ["rows", "states and rows", "windows as long as a block"])
    def test_a_draft_model_shares_the_ssd_manager(self, tmp_path: Path, draft: str) -> None:
        target, shadow, _ = opened(FAMILIES["rows"], tmp_path, model_name="target")
        small = make_tiny_llama(layers=1, seed=9) if draft == "rows" else FAMILIES[draft].model
        with target, Scheduler(small, tmp_path, model_name="draft", ssd=target.ssd) as second:
            behind = Shadow(small, second.block_size)
            prompt = text(5 * BLOCK + 3)
            assert shadow.serve(target, prompt) == 0
            assert behind.serve(second, prompt) == 0
            for engine, its in ((target, shadow), (second, behind)) * 2:
                assert its.serve(engine, [*prompt, 1]) == 5 * BLOCK
            target.recover()
            assert behind.serve(second, [*prompt, 2]) == 5 * BLOCK
            second.recover()
            assert shadow.serve(target, [*prompt, 3]) == 5 * BLOCK
            # The target's form changes: its blocks are gone, the draft's are not.
            target.refresh_layer_signature(["QuantizedKVCache"] * 3)
            assert behind.serve(second, [*prompt, 4]) == 5 * BLOCK
            assert_at_rest(target)
            assert_at_rest(second)

    def test_another_structure_under_the_same_name(self, tmp_path: Path) -> None:
        """Layers, their types, or the size of blocks changed between two starts: nothing stale is served."""
        prompt = text(5 * 16 + 3)
        engines = [
            (make_tiny_llama(), 16),
            (make_tiny_llama(layers=2), 16),
            (FAMILIES["states and rows"].model, 16),
            (make_tiny_llama(), 8),
        ]
        for model, size in engines:
            with Scheduler(model, tmp_path, block_size=size) as engine:
                shadow = Shadow(model, size)
                assert shadow.serve(engine, prompt) == 0
                assert shadow.serve(engine, [*prompt, 1]) == 80
                assert_at_rest(engine)


class TestMemory:
    MODES = {
        "through": {},
        "back": {"hot_cache_max_bytes": 64 << 20},
        "little": {"hot_cache_max_bytes": 200 << 10},
        "ram only": {"hot_cache_max_bytes": 64 << 20, "hot_cache_only": True},
    }

    @most_families()
    @pytest.mark.parametrize("mode", ["back", "little", "ram only", long("through")])
    def test_modes(self, family: Family, tmp_path: Path, mode: str) -> None:
        engine, shadow, size = opened(family, None if mode == "ram only" else tmp_path, **self.MODES[mode])
        with engine:
            prompt, answer = text(5 * size + 3), text(size, seed=3)
            assert shadow.serve(engine, prompt, answer) == 0
            for pressure in (False, True, False):
                request = engine.admit([*prompt, 1], pressure=pressure)
                engine.prefill(request)
                shadow.check(request)
                assert request.cached_tokens == 5 * size
                engine.abort(request)
            found = shadow.serve(engine, [*prompt, *answer, *text(size, seed=4)], pressure=True)
            # Snapshots in memory do not say how many tokens they are of. Where nothing else does, the newest is lost.
            unknown = mode == "ram only" and family in (FAMILIES["states alone"], FAMILIES["states and rows"])
            assert found == (5 if unknown else 6) * size
            assert_at_rest(engine)
        if mode == "ram only":
            return
        engine, _, _ = opened(family, tmp_path, **self.MODES[mode])
        with engine:
            assert shadow.serve(engine, [*prompt, 2]) == 5 * size

    @two_families()
    def test_pressure_while_requests_run(self, family: Family, tmp_path: Path) -> None:
        """A third thread shrinks and clears the hot tier and reads statistics all the time."""
        engine, shadow, size = opened(family, tmp_path, hot_cache_max_bytes=4 << 20)
        done, errors = threading.Event(), []

        def administer() -> None:
            dice = random.Random(5)
            try:
                while not done.wait(0.001):
                    blocks = list(engine.paged.allocated_blocks.values())
                    protected = {block.block_hash for block in blocks if block.ref_count and block.block_hash}
                    engine.ssd.shrink_hot_cache_to(dice.choice([0, 1 << 16, 1 << 20]), protected_hashes=protected)
                    if dice.random() < 0.1:
                        engine.ssd.clear_hot_cache()
                    engine.ssd.get_stats(), engine.ssd.get_stats_dict()
                    engine.prefix.get_stats_dict(), engine.paged.get_stats()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        admin = threading.Thread(target=administer)
        with engine:
            admin.start()
            try:
                prompt = text(3 * size + 5)
                for number in range(8):
                    asked = [*prompt[: (number % 3 + 1) * size + 3], *text(size, seed=40 + number)]
                    request = engine.admit(asked, pressure=number % 2 == 1)
                    engine.prefill(request)
                    engine.decode(request, text(3, seed=number))
                    shadow.check(request)
                    assert request.cached_tokens % size == 0
                    engine.finish(request, pressure=number % 4 == 3)
                    engine.settle()
                    shadow.note(request)
            finally:
                done.set()
                admin.join()
            assert errors == []
            assert_at_rest(engine)

    def test_a_budget_for_two_engines(self, tmp_path: Path) -> None:
        budget = SharedHotCacheBudget(300 << 10)
        families = [FAMILIES["rows"], FAMILIES["states and rows"]]
        engines = [
            opened(family, tmp_path, model_name=str(number), hot_cache_budget=budget)
            for number, family in enumerate(families)
        ]
        for number in range(6):
            for engine, shadow, size in engines:
                prompt = text(3 * size + 2, seed=60 + number)
                assert shadow.serve(engine, prompt, [1]) == 0
                assert budget.total_bytes <= 300 << 10
        budget.shrink_to(0)
        assert budget.total_bytes == 0
        for number in range(6):
            for engine, shadow, size in engines:
                assert shadow.serve(engine, text(3 * size + 2, seed=60 + number)) == 3 * size
                assert_at_rest(engine)
        for engine, _, _ in engines:
            engine.close()


class Visitors:
    """Requests in random order over prompts that share beginnings: served, dropped, several at once, over restarts,
    in a pool, a RAM tier and a disk that are too small for all of them."""

    def __init__(self, family: Family, directory: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.family, self.directory = family, directory
        self.shadow = Shadow(family.model, BLOCK, canonical=True)
        self.prompts: list[list[int]] = [[]]
        self.running: list[Any] = []
        self.hits = 0
        self.engine = self.opened()

    def opened(self) -> Scheduler:
        sizes = {"max_size_bytes": 3 << 20, "hot_cache_max_bytes": self.dice.choice([0, 1 << 18, 1 << 22])}
        return Scheduler(self.family.model, self.directory, max_blocks=24, initial_blocks=4, **sizes)

    def visit(self) -> None:
        what = self.dice.choices(["new", "go on", "leave", "recover", "restart"], [10, 12, 3, 1, 1])[0]
        if what == "new" and len(self.running) < 4:
            self.admit()
        elif what in ("go on", "leave") and self.running:
            self.end(self.running.pop(self.dice.randrange(len(self.running))), what == "leave")
        elif what in ("recover", "restart"):
            while self.running:
                self.end(self.running.pop(), leave=True)
            self.engine.recover() if what == "recover" else self.engine.close()
            self.engine = self.engine if what == "recover" else self.opened()

    def admit(self) -> None:
        before = self.dice.choice(self.prompts[-8:])
        shared = before[: self.dice.randint(0, len(before))]
        fresh = [self.dice.randint(1, 125) for _ in range(self.dice.randint(2, 3 * BLOCK))]
        prompt = [*shared, *fresh][: 5 * BLOCK + 7]
        # Never whole blocks, so that no block holds rows of a prompt that were run one by one.
        prompt = prompt if len(prompt) % BLOCK else prompt[:-1]
        self.prompts.append(prompt)
        request = self.engine.admit(prompt, pressure=self.dice.random() < 0.2)
        assert request.cached_tokens % BLOCK == 0
        self.hits += request.cached_tokens > 0
        self.running.append(request)

    def end(self, request: Any, leave: bool) -> None:
        if leave and self.dice.random() < 0.5:
            return self.engine.abort(request)
        self.engine.prefill(request)
        self.engine.decode(request, [self.dice.randint(1, 125) for _ in range(self.dice.randint(0, 9))])
        self.shadow.check(request)
        if leave:
            return self.engine.abort(request)
        return self.engine.finish(request, pressure=self.dice.random() < 0.2)

    def close(self) -> None:
        while self.running:
            self.end(self.running.pop(), leave=False)
        assert_at_rest(self.engine)
        self.engine.close()


@most_families(("states and rows", "windows of half a block"))
@pytest.mark.parametrize("seed", [0, *map(long, range(1, 6))])
def test_any_order(family: Family, tmp_path: Path, seed: int) -> None:
    visitors = Visitors(family, tmp_path, seed)
    for _ in range(300 if seed else 60):
        visitors.visit()
    visitors.close()
    assert visitors.hits >= 5


CHILD = """
import hashlib, json, sys, time
import mlx.core as mx
from pathlib import Path
from omlx_families import FAMILIES
from omlx_scheduler import Scheduler

mx.disable_compile()
order = json.load(sys.stdin)
family = FAMILIES[order["family"]]
engine = Scheduler(family.model, Path(sys.argv[1]), **order["options"])
for prompt, answer in order["requests"]:
    request = engine.serve(prompt, answer)
    bits = b"".join(bytes(memoryview(mx.contiguous(x).view(mx.uint8))) for x in request.logits)
    print(json.dumps([request.cached_tokens, hashlib.sha256(bits).hexdigest()]), flush=True)
if order["wait"]:
    time.sleep(60)
engine.close()
"""


def digest(logits: list[mx.array]) -> str:
    return hashlib.sha256(b"".join(bytes(memoryview(mx.contiguous(x).view(mx.uint8))) for x in logits)).hexdigest()


def child(directory: Path, family: str, requests: list[Any], wait: bool = False, **options: Any) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(directory)],
        env=child_environment(HERE, EXAMPLES),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    json.dump({"family": family, "requests": requests, "wait": wait, "options": options}, process.stdin)
    process.stdin.close()
    return process


# States and rows are among the killed.
RESTARTED = ["rows", long("states and rows"), "windows of half a block", long("states alone")]
KILLED = [0, long(64 << 20)]


class TestProcesses:
    @pytest.mark.parametrize("name", RESTARTED)
    def test_restart(self, tmp_path: Path, name: str) -> None:
        engine, shadow, size = opened(FAMILIES[name], tmp_path)
        prompt, answer = text(4 * size + 3), text(5, seed=3)
        with engine:
            shadow.serve(engine, prompt, answer)
            here = engine.serve([*prompt, 1, 2], [3, 4])
            shadow.check(here)
        process = child(tmp_path, name, [[[*prompt, 1, 2], [3, 4]]])
        answered = [json.loads(line) for line in process.stdout]
        assert process.wait() == 0
        assert answered == [[4 * size, digest(here.logits)]]

    @pytest.mark.parametrize("name", [long("rows"), "states and rows"])
    @pytest.mark.parametrize("hot", KILLED)
    def test_killed(self, tmp_path: Path, name: str, hot: int) -> None:
        """After the answer, at once: whole blocks or none, from the first on, and nothing wrong among them."""
        prompts = [text(4 * BLOCK + 3, seed=seed) for seed in (50, 51)]
        process = child(tmp_path, name, [[prompt, [5]] for prompt in prompts], wait=True, hot_cache_max_bytes=hot)
        for _ in prompts:
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        # What the dead process computed is computed again, and stored elsewhere.
        twin, shadow, size = opened(FAMILIES[name], tmp_path / "twin", model_name="twin")
        with twin:
            for prompt in prompts:
                shadow.serve(twin, prompt, [5])
        with Scheduler(FAMILIES[name].model, tmp_path) as engine:
            for prompt in prompts:
                found = shadow.serve(engine, [*prompt, 1, 2])
                assert found % size == 0
                assert found <= 4 * size
                assert shadow.serve(engine, [*prompt, 1, 3]) == 4 * size
            assert_at_rest(engine)
