"""What all benchmarks share: fresh processes, interleaved rounds, rows with targets, and the reports.

A benchmark file has *scenarios* (functions that measure and return numbers) and one ``rows`` function that runs them
and compares. Every scenario runs in a process of its own, so that what one leaves in the allocator is not the start of
the next. A scenario that is run with ``recycled=True`` keeps freed memory in the process: its destinations have been
touched before. Without it, the C library gives large buffers back to the system, and each one faults again.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Numbers = dict[str, Any]
Scenario = Callable[..., Numbers]

# glibc only; elsewhere a "touched" destination is whatever the allocator gives.
RECYCLED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_TOP_PAD_": "0"}
HAS_GLIBC = platform.libc_ver()[0] == "glibc"
THREADS = max(1, min(os.cpu_count() or 1, 8))


@dataclass
class Row:
    """One line of the report. ``target`` is ``"<= 1.3"`` or ``">= 0.8"`` in the row's unit; None if it only informs."""

    claim: str
    tokens: int
    value: float
    unit: str
    target: str | None = None
    against: str = ""
    note: str = ""

    @property
    def passed(self) -> bool | None:
        if self.target is None:
            return None
        sign, limit = self.target.split()
        return self.value <= float(limit) if sign == "<=" else self.value >= float(limit)


@dataclass
class Settings:
    tokens: list[int]
    rounds: int
    scratch: Path
    script: str = field(default_factory=lambda: sys.argv[0])

    def run(self, scenario: Scenario, *, recycled: bool = False, **arguments: Any) -> Numbers:
        """The scenario's numbers, from a fresh process."""
        said = " ".join(f"{name}={value}" for name, value in arguments.items() if name not in ("scratch", "rounds"))
        print(f"  {scenario.__name__} {said}{' recycled' if recycled else ''}", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=self.scratch) as folder:
            arguments = {"rounds": self.rounds, "scratch": folder, **arguments}
            return run_in_process(self.script, scenario.__name__, arguments, recycled)


def run_in_process(script: str, scenario: str, arguments: Mapping[str, Any], recycled: bool) -> Numbers:
    """Runs one scenario of a benchmark file in a new process. RuntimeError with its output if it fails."""
    env = {name: value for name, value in os.environ.items() if name not in RECYCLED}
    if recycled and HAS_GLIBC:
        env.update(RECYCLED)
    command = [sys.executable, script, "--scenario", scenario, json.dumps(arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{scenario} {arguments} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def interleaved(parts: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Medians of each part's seconds. Parts take turns, so that a slow spell of the machine touches all of them.

    A part does one round and returns the seconds that count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(rounds):
        for name, part in parts.items():
            seconds[name].append(part())
    return {name: statistics.median(values) for name, values in seconds.items()}


def timed(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(rows: Callable[[Settings], Iterator[Row]], scenarios: list[Scenario]) -> None:
    """The command line of a benchmark file."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--tokens", default="2048,8192,32768", help="prompt lengths, comma separated")
    parser.add_argument("--rounds", type=int, default=7, help="rounds a median is taken of")
    parser.add_argument("--dir", type=Path, help="where blocks and files are written (default: the temporary folder)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    parser.add_argument("--scenario", nargs=2, metavar=("NAME", "ARGUMENTS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scenario:
        name, arguments = options.scenario
        found = {scenario.__name__: scenario for scenario in scenarios}[name]
        print(json.dumps(found(**json.loads(arguments))))
        return
    scratch = Path(tempfile.mkdtemp(prefix="prefixcache-bench-", dir=options.dir))
    try:
        settings = Settings([int(n) for n in options.tokens.split(",")], options.rounds, scratch)
        before = load()
        result = list(rows(settings))
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    name = Path(sys.argv[0]).stem
    report = {"benchmark": name, "command": command_line(options), "load": [before, load()], "rows": as_dicts(result)}
    print(markdown(report))
    if options.json:
        options.json.write_text(json.dumps({"machine": machine(), "reports": [report]}, indent=1) + "\n")


def command_line(options: argparse.Namespace) -> str:
    """The command that gives a report again."""
    return f"python benchmarks/{Path(sys.argv[0]).name} --tokens {options.tokens} --rounds {options.rounds}"


def as_dicts(rows: list[Row]) -> list[dict[str, Any]]:
    return [{**asdict(row), "passed": row.passed} for row in rows]


def load() -> float:
    """The machine's load average over a minute; -1 where there is none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else -1.0


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    import importlib.metadata as packages

    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "mlx": packages.version("mlx"),
        "mlx_lm": packages.version("mlx-lm"),
        "huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/enabled"),
        "date": time.strftime("%Y-%m-%d %H:%M"),
    }


def _processor() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _first_line(path: str) -> str:
    return next(iter(_lines(path)), "none")


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def markdown(report: Mapping[str, Any]) -> str:
    """One benchmark's table."""
    lines = [
        f"### {report['benchmark']}",
        "",
        f"`{report['command']}` (load average {report['load'][0]} before, {report['load'][1]} after)",
        "",
        "| claim | tokens | measured | target | | against | note |",
        "|---|--:|--:|--:|---|---|---|",
    ]
    verdicts = {None: "", True: "ok", False: "MISSED"}
    for row in report["rows"]:
        measured = f"{row['value']:.3g} {row['unit']}".strip()
        lines.append(
            f"| {row['claim']} | {row['tokens']:,} | {measured} | {row['target'] or ''} | {verdicts[row['passed']]} "
            f"| {row['against']} | {row['note']} |"
        )
    return "\n".join(lines) + "\n"
