"""A conversation of three turns over a long system prompt, with a real model: cold, from RAM, and after a restart.

    python examples/demo.py

Every answer is checked against a run without the cache: the same tokens, and for the first one the same logits, bit
for bit. The program ends with status 1 if one differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import smollm2
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from prefixcache import Hit, PrefixCache
from prefixcache.mlx_lm import stream_generate

INTRODUCTION = "You are a helpful AI assistant that works as the guide of the Harbour Museum."
MANNERS = "You are polite and you know a lot about ships and the sea. These are the rooms of the museum."
THINGS = ["brass compasses", "rope and knots", "lighthouse lamps", "sea charts", "model ships", "diving suits"]
THINGS += ["fishing nets", "signal flags", "ship bells", "anchors", "whale songs", "storm glasses"]
DETAILS = ["Please do not touch the glass", "Children may try this at the low table", "A film begins every half hour"]
DETAILS += ["The guide tells its story at noon", "Lent by the families of the old town"]
QUESTIONS = ["Why do ships need an anchor?", "What is the largest animal in the sea?", "Which ocean is the largest?"]
DECODE_WEIGHT = 16  # how much longer a decoded token takes than a prefilled one, for the progress bar


@dataclass
class Plan:
    """What fits into the time: a short prompt and small blocks where matrix products are slow."""

    rooms: int
    block_size: int
    max_tokens: int

    def system_prompt(self) -> str:
        lines = [
            f"Room {i + 1}: {THINGS[i % len(THINGS)]}, floor {i % 4 + 1}, made in {1780 + 7 * i}. "
            f"{DETAILS[i % len(DETAILS)]}."
            for i in range(self.rooms)
        ]
        return "\n".join([f"{INTRODUCTION} {MANNERS}", *lines] if lines else [INTRODUCTION])


@dataclass
class Turn:
    """One answer: what was reused for it, how long it took, and what it said. Seconds and bytes."""

    place: str
    number: int
    prompt: list[int] = field(repr=False)
    reused: int = 0
    tiers: dict[str, int] = field(default_factory=dict)
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    first_token_with: float = 0.0
    first_token_without: float = 0.0
    answer: list[int] = field(default_factory=list)
    logits: str = ""
    same: bool = False

    def agrees_with(self, tokens: list[int], logits: str) -> bool:
        return self.answer == tokens and self.logits == logits


class Watch:
    """Collects one run: its tokens, the digest of its first logits and the time to its first token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.first_token = 0.0
        self._logits: mx.array | None = None
        mx.synchronize()
        self._start = time.perf_counter()

    def look(self, _: mx.array, logits: mx.array) -> mx.array:
        """A logits processor that changes nothing."""
        if self._logits is None:
            self._logits = logits
        return logits

    def saw(self, token: int) -> None:
        if not self.tokens:
            self.first_token = time.perf_counter() - self._start
        self.tokens.append(token)

    def digest(self) -> str:
        assert self._logits is not None
        return hashlib.sha256(bytes(memoryview(mx.contiguous(self._logits).view(mx.uint8)))).hexdigest()


class Reference:
    """The same conversation without prefixcache: one mlx-lm cache that is never stored, in chunks of the same shapes.

    (Matrix products over chunks of other shapes differ in their last bits, with or without a cache.)
    """

    def __init__(self, model: Any, tokenizer: Any, block_size: int) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._model, self._tokenizer, self._block_size = model, tokenizer, block_size
        self._caches = make_prompt_cache(model)
        self._seen: list[int] = []

    def answer(self, turn: Turn, ends: list[int], max_tokens: int, tick: Callable[[int], None]) -> Watch:
        """``ends``: where the chunks that prefixcache's run computed ended. What it reused was computed blockwise."""
        from mlx_lm import stream_generate as plain_generate
        from mlx_lm.models.cache import trim_prompt_cache

        prompt = turn.prompt
        n = min(common_prefix(self._seen, prompt), turn.reused)
        trim_prompt_cache(self._caches, len(self._seen) - n)
        watch = Watch()
        blockwise = range(0, turn.reused, self._block_size)
        for end in sorted({*ends, *blockwise, turn.reused}):
            if end > n:
                self._model(mx.array(prompt[n:end])[None], cache=self._caches)
                mx.eval([cache.state for cache in self._caches])
                tick(end - n)
                n = end
        last = mx.array(prompt[n:])
        options = {"prompt_cache": self._caches, "logits_processors": [watch.look], "max_tokens": max_tokens}
        for response in plain_generate(self._model, self._tokenizer, last, **options):
            watch.saw(response.token)
            tick(DECODE_WEIGHT)
        self._seen = [*prompt, *watch.tokens][: self._caches[0].offset]
        return watch


def common_prefix(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def run_cached(
    model: Any, tokenizer: Any, cache: PrefixCache, turn: Turn, max_tokens: int, tick: Callable[[int], None]
) -> list[int]:
    """Fills in ``turn``; returns where the chunks of its prefill ended."""
    ends: list[int] = []

    def on_hit(hit: Hit) -> None:
        turn.reused, turn.tiers = hit.cached_tokens, dict(hit.tiers)
        turn.restored_bytes, turn.restore_seconds = hit.bytes, hit.seconds

    def progress(done: int, total: int) -> None:
        tick(done - (ends[-1] if ends else turn.reused))
        ends.append(min(done, total - 1))

    watch = Watch()
    for response in stream_generate(
        model,
        tokenizer,
        turn.prompt,
        max_tokens,
        prefix_cache=cache,
        on_hit=on_hit,
        prefill_step_size=cache.block_size,
        prompt_progress_callback=progress,
        logits_processors=[watch.look],
    ):
        watch.saw(response.token)
        tick(DECODE_WEIGHT)
    turn.answer, turn.logits, turn.first_token_with = watch.tokens, watch.digest(), watch.first_token
    return ends


def time_plain(model: Any, tokenizer: Any, prompt: list[int], tick: Callable[[int], None]) -> float:
    """Seconds to the first token of mlx-lm's own stream_generate."""
    from mlx_lm import stream_generate as plain_generate

    watch = Watch()
    for response in plain_generate(model, tokenizer, prompt, max_tokens=1):
        watch.saw(response.token)
    tick(len(prompt))
    return watch.first_token


class Demo:
    """The conversation in this process, then its replay in a new one."""

    def __init__(self, options: argparse.Namespace, console: Console, bar: Progress) -> None:
        self._options, self._console, self._bar = options, console, bar
        self._fast = smollm2.has_fast_blas()
        rooms, block_size, max_tokens = (20, 256, 20) if self._fast else (0, 16, 5)
        rooms = rooms if options.rooms is None else options.rooms
        self.plan = Plan(rooms, block_size, options.max_tokens or max_tokens)
        self.turns: list[Turn] = []
        self._task = bar.add_task("", total=None)

    def run(self, directory: str) -> list[Turn]:
        try:
            folder = smollm2.prepare(self._options.model_dir, say=self._say)
        except (RuntimeError, ValueError) as error:
            raise SystemExit(f"demo: {error}") from None
        if not self._fast:
            self._console.print(
                "[yellow]This machine multiplies matrices with MLX's slow reference BLAS, so the prompt is short. "
                "(Debian, Ubuntu: libopenblas0-pthread in LD_PRELOAD makes it 30 times faster.)"
            )
        self._say("loading the model")
        model, tokenizer = smollm2.load(folder)
        self._say("fingerprinting the model")
        with PrefixCache.open(directory, model, block_size=self.plan.block_size) as cache:
            self._converse(model, tokenizer, cache)
            self._say("writing to the SSD")
            cache.flush()
        self._replay(directory, folder)
        return self.turns

    def _converse(self, model: Any, tokenizer: Any, cache: PrefixCache) -> None:
        reference = Reference(model, tokenizer, self.plan.block_size)
        messages = [{"role": "system", "content": self.plan.system_prompt()}]
        for number, question in enumerate(QUESTIONS[: self._options.turns], 1):
            messages.append({"role": "user", "content": question})
            prompt = list(tokenizer.apply_chat_template(messages, add_generation_prompt=True))
            turn = Turn("first", number, prompt)
            if number == 1:
                self._expect(len(prompt))
            self._say(f"turn {number}: with prefixcache")
            ends = run_cached(model, tokenizer, cache, turn, self.plan.max_tokens, self._tick)
            self._say(f"turn {number}: the same without it, to compare")
            watch = reference.answer(turn, ends, self.plan.max_tokens, self._tick)
            self._say(f"turn {number}: mlx-lm alone, to time it")
            turn.first_token_without = time_plain(model, tokenizer, prompt, self._tick)
            turn.same = turn.agrees_with(watch.tokens, watch.digest())
            self.turns.append(turn)
            answer = tokenizer.decode([token for token in turn.answer if token not in tokenizer.eos_token_ids])
            messages.append({"role": "assistant", "content": answer})
            dots = "" if turn.answer[-1] in tokenizer.eos_token_ids else " ..."
            self._console.print(Text.assemble((f"  {question}\n", "bold"), f"  {answer.strip()}{dots}"))

    def _replay(self, directory: str, folder: Path) -> None:
        """The same prompts in a new process that has the directory and nothing else."""
        self._say("a new process: loading the model")
        order = {
            "directory": directory,
            "folder": str(folder),
            "block_size": self.plan.block_size,
            "max_tokens": self.plan.max_tokens,
            "prompts": [turn.prompt for turn in self.turns],
        }
        command = [sys.executable, __file__, "--replay"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None and child.stdout is not None
            json.dump(order, child.stdin)
            child.stdin.close()
            for line in child.stdout:
                message = json.loads(line)
                if isinstance(message, int):
                    self._tick(message)
                    continue
                turn, original = Turn(**message), self.turns[message["number"] - 1]
                turn.first_token_without = original.first_token_without
                turn.same = original.same and turn.agrees_with(original.answer, original.logits)
                self.turns.append(turn)
                self._say(f"a new process: turn {turn.number} answered")
        if child.returncode != 0:
            raise RuntimeError(f"the new process ended with status {child.returncode}")

    def _expect(self, prompt: int) -> None:
        """Sets the bar's length: two runs of the first prompt in full, one of each later one, and the decoding."""
        turns, tokens = self._options.turns, self.plan.max_tokens
        later = sum(prompt + number * (tokens + 16) for number in range(1, turns))
        self._bar.update(self._task, total=3 * prompt + later + 3 * turns * tokens * DECODE_WEIGHT)

    def _say(self, what: str) -> None:
        self._bar.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(what)

    def _tick(self, amount: int) -> None:
        self._bar.advance(self._task, amount)


def replay() -> None:
    """The new process: reads an order from stdin, writes turns and ticks as lines of JSON."""
    order = json.load(sys.stdin)

    def tick(amount: int) -> None:
        print(amount, flush=True)

    model, tokenizer = smollm2.load(order["folder"])
    # Without a RAM tier every block comes from the SSD, also the second time.
    with PrefixCache.open(order["directory"], model, block_size=order["block_size"], ram=0) as cache:
        for number, prompt in enumerate(order["prompts"], 1):
            turn = Turn("new", number, prompt)
            run_cached(model, tokenizer, cache, turn, order["max_tokens"], tick)
            print(json.dumps(asdict(turn)), flush=True)


def table_of(turns: list[Turn]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
        title="Seconds to the first token, without and with prefixcache",
        title_style="bold",
        caption="MB, GB/s: what was restored. RAM: in this process. SSD: in a new one.",
    )
    for heading in ("turn", "prompt", "reused", "without", "with", "gain", "MB", "GB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    table.add_column("same", no_wrap=True)
    for before, turn in zip([None, *turns], turns, strict=False):
        if before is not None and before.place != turn.place:
            table.add_section()
        rate = turn.restored_bytes / turn.restore_seconds / 1e9 if turn.restored_bytes else 0.0
        restored = (f"{turn.restored_bytes / 1e6:.1f}", f"{rate:.1f}") if turn.reused else ("", "")
        table.add_row(
            str(turn.number),
            f"{len(turn.prompt):,}",
            f"{turn.reused:,}",
            f"{turn.first_token_without:.2f}",
            f"[bold]{turn.first_token_with:.2f}",
            f"[bold green]{turn.first_token_without / turn.first_token_with:.0f} x" if turn.reused else "",
            *restored,
            " + ".join(tier.upper() for tier, tokens in turn.tiers.items() if tokens) or "cold",
            "[green]yes" if turn.same else "[bold red]NO",
        )
    return table


@contextmanager
def cache_directory(chosen: str | None) -> Iterator[str]:
    if chosen is not None:
        yield chosen
        return
    with tempfile.TemporaryDirectory(prefix="prefixcache-demo-") as directory:
        yield directory


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--cache-dir", help="keep the cache here (default: a temporary directory)")
    parser.add_argument("--model-dir", help="the prepared model (default: .cache/smollm2 of the project)")
    parser.add_argument("--turns", type=int, default=3, choices=range(1, len(QUESTIONS) + 1))
    parser.add_argument("--max-tokens", type=int, help="tokens of each answer (default: 20, less on a slow machine)")
    parser.add_argument("--rooms", type=int, help="length of the system prompt, about 30 tokens a room (default: 20)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON instead of a table")
    parser.add_argument("--replay", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.max_tokens is not None and options.max_tokens < 1:
        parser.error(f"--max-tokens must be at least 1, not {options.max_tokens}")
    if options.rooms is not None and options.rooms < 0:
        parser.error(f"--rooms must not be negative, not {options.rooms}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.replay:
        replay()
        return 0
    started = time.perf_counter()
    console = Console(stderr=options.json, highlight=False)
    if not console.is_terminal:
        console.width = 100
    columns = (SpinnerColumn(), BarColumn(30), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    with (
        cache_directory(options.cache_dir) as directory,
        Progress(
            *columns, TextColumn("{task.description}"), console=console, transient=True, disable=not console.is_terminal
        ) as bar,
    ):
        turns = Demo(options, console, bar).run(directory)
    good = sum(turn.same for turn in turns)
    if options.json:
        hidden = ("prompt", "answer")
        figures = [
            {k: v for k, v in asdict(turn).items() if k not in hidden} | {"prompt_tokens": len(turn.prompt)}
            for turn in turns
        ]
        print(json.dumps({"turns": figures, "seconds": time.perf_counter() - started}, indent=2))
    else:
        console.print(table_of(turns))
    verdict = "every token, and the first logits bit for bit" if good == len(turns) else "the others differ"
    console.print(
        f"[{'green' if good == len(turns) else 'bold red'}]{good} of {len(turns)} answers equal those of a run without "
        f"prefixcache: {verdict}.[/] {time.perf_counter() - started:.0f} s in all."
    )
    return 0 if good == len(turns) else 1


if __name__ == "__main__":
    sys.exit(main())
