"""The Python test suite on a GPU: all but the long tests, with a short account of what failed and what was skipped.

Usage: suite.py [REPORT [pytest arguments]]     all that pytest prints goes to REPORT (default: build/gpu-suite.txt)

PREFIXCACHE_SUITE_WORKERS: processes (default: half the cores, 12 at most). PREFIXCACHE_SUITE_SECONDS: stop after so
long and say what is known then. Ends with pytest's status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

ROOT = Path(__file__).resolve().parents[2]
MOST_FAILURES = 40


class Account:
    """A pytest plugin that counts outcomes, and what it prints in the end."""

    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()
        self.failures: list[str] = []
        self.reasons: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.outcomes["failed" if report.when == "call" else "errors"] += 1
            self.failures.append(f"{short(report.nodeid)}: {crash(report)}")
        elif report.skipped:
            self.outcomes["skipped"] += 1
            # A skip's longrepr is (file, line, reason); that of an expected failure is not.
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else "expected to fail"
            self.reasons[" ".join(text.removeprefix("Skipped: ").split())[:150]] += 1
        elif report.when == "call":
            self.outcomes["passed"] += 1

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.outcomes["errors"] += 1
            self.failures.append(f"{short(report.nodeid)}: not collected: {crash(report)}")

    def show(self) -> None:
        for heading, lines in (
            ("failed", self.failures[:MOST_FAILURES]),
            ("skipped", [f"{count} x {reason}" for reason, count in self.reasons.most_common(25)]),
            ("slowest", [f"{spent:.1f} s {short(name)}" for name, spent in self.seconds.most_common(8)]),
        ):
            if lines:
                print(f"{heading}:", *(f"  {line}" for line in lines), sep="\n")
        if len(self.failures) > MOST_FAILURES:
            files = Counter(failure.split("::")[0] for failure in self.failures[MOST_FAILURES:])
            print(f"  and {files.total()} more:", ", ".join(f"{name} {count}" for name, count in files.most_common()))


def short(nodeid: str) -> str:
    return nodeid.removeprefix("tests/python/")


def crash(report: Any) -> str:
    """The line of an error that says most, cut to fit."""
    message = getattr(getattr(report.longrepr, "reprcrash", None), "message", None) or str(report.longrepr)
    return " ".join(message.split())[:170]


def stop_after(seconds: int) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt(f"{seconds} s are over")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)


def main(arguments: list[str]) -> int:
    report = Path(arguments[0] if arguments else ROOT / "build" / "gpu-suite.txt").resolve()
    report.parent.mkdir(parents=True, exist_ok=True)
    workers = os.environ.get("PREFIXCACHE_SUITE_WORKERS") or str(min(12, max(1, (os.cpu_count() or 1) // 2)))
    options = ["-n", workers, "--dist", "worksteal", "-m", "not long", "-q", "--tb=short", "--color=no"]
    account = Account()
    if limit := os.environ.get("PREFIXCACHE_SUITE_SECONDS"):
        stop_after(int(limit))
    os.chdir(ROOT)
    started = time.perf_counter()
    status: int = pytest.ExitCode.INTERRUPTED
    with report.open("w") as file, contextlib.redirect_stdout(file), contextlib.suppress(KeyboardInterrupt):
        status = pytest.main([*options, *arguments[1:]], plugins=[account])
    signal.alarm(0)
    account.show()
    outcomes = ", ".join(f"{count} {outcome}" for outcome, count in sorted(account.outcomes.items()))
    print(f"MLX {mx.__version__} on {mx.default_device()}, {workers} processes: {outcomes}")
    print(f"status {int(status)} after {time.perf_counter() - started:.0f} s; all of it: {report}")
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
