"""Runs every benchmark and writes results.json and results.md. Ends non-zero if a target is missed."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import load, machine, markdown

HERE = Path(__file__).parent
BENCHMARKS = [
    "bench_reference",
    "bench_hash",
    "bench_lookup",
    "bench_open",
    "bench_contention",
    "bench_store",
    "bench_restore",
    "bench_gather",
    "bench_append",
    "bench_windows",
    "bench_states",
    "bench_omlx",
    "bench_mlx_lm",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="2048,8192,32768", help="prompt lengths, comma separated")
    parser.add_argument("--rounds", type=int, default=7, help="rounds a median is taken of")
    parser.add_argument("--quick", action="store_true", help="2,048 tokens, 3 rounds: does it run?")
    parser.add_argument("--only", default=",".join(BENCHMARKS), help="benchmarks to run, comma separated")
    parser.add_argument("--dir", type=Path, help="where blocks and files are written (default: the temporary folder)")
    parser.add_argument("--out", type=Path, default=Path("build/bench"), help="folder for results.json and results.md")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = "2048", 3
    options.out.mkdir(parents=True, exist_ok=True)
    reports: list[dict[str, Any]] = []
    for name in options.only.split(","):
        print(f"{name} (load average {load()})", file=sys.stderr, flush=True)
        part = options.out / f"{name}.json"
        command = [sys.executable, str(HERE / f"{name}.py"), "--json", str(part)]
        command += ["--tokens", options.tokens, "--rounds", str(options.rounds)]
        if options.dir is not None:
            command += ["--dir", str(options.dir)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        reports += json.loads(part.read_text())["reports"]
        part.unlink()
        # After each one: a run that is cut short leaves what it has.
        _write(options.out, reports)
    print((options.out / "results.md").read_text())
    missed = [row for report in reports for row in report["rows"] if row["passed"] is False]
    print(f"{len(missed)} target(s) missed" if missed else "all targets are met")
    return 1 if missed else 0


def _write(out: Path, reports: list[dict[str, Any]]) -> None:
    about = machine()
    (out / "results.json").write_text(json.dumps({"machine": about, "reports": reports}, indent=1) + "\n")
    said = "\n".join(f"* {name.replace('_', ' ')}: {value}" for name, value in about.items())
    tables = "\n".join(markdown(report) for report in reports)
    (out / "results.md").write_text(f"# Benchmark results\n\n{said}\n\n{tables}")


if __name__ == "__main__":
    sys.exit(main())
