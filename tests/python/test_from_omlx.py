"""docs/from_omlx.md names every public name of oMLX's modules, and only tests that there are."""

from __future__ import annotations

import ast
import inspect
import re
from importlib import import_module
from types import ModuleType

import pytest
from support import ROOT

PAGE = (ROOT / "docs" / "from_omlx.md").read_text(encoding="utf-8")
MODULES = [
    "prefix_cache",
    "paged_cache",
    "paged_ssd_cache",
    "hybrid_cache",
    "type_registry",
    "type_handlers",
    "_rotating_subclass",
    "boundary_snapshot_store",
    "interface",
    "stats",
    "observability",
    "factory",
    "recovery",
]
# The methods of these classes are the module's interface; those of others are covered by their class.
WHOLE = {"BlockAwarePrefixCache", "PagedCacheManager", "PagedSSDCacheManager", "SharedHotCacheBudget"}
WHOLE |= {"CacheTypeRegistry", "ModelCacheConfig", "BoundarySnapshotSSDStore"}


def public(module: ModuleType) -> list[str]:
    own = [name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
    return getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]


def test_the_walk_finds_names() -> None:
    assert public(import_module("prefixcache.observability")) == ["CacheRateTracker"]
    assert "compute_block_hash" in public(import_module("prefixcache.paged_cache"))


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_on_the_page(name: str) -> None:
    module = import_module(f"prefixcache.{name}")
    wanted = set(public(module))
    for found in wanted & WHOLE:
        # What every manager has is a row of the base class.
        base = set(dir(import_module("prefixcache.interface").CacheManager))
        wanted |= {
            member
            for member, value in inspect.getmembers(getattr(module, found))
            if not member.startswith("_") and member not in base and (callable(value) or isinstance(value, property))
        }
    said = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", PAGE))))
    assert wanted - said == set()


def defined_in(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / "python" / file).read_text(encoding="utf-8"))
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {f"{node.name}::{inner.name}" for inner in node.body if isinstance(inner, ast.FunctionDef)}
    return found


def test_every_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::([\w:]+)`", PAGE)
    assert len(named) > 60
    missing = [f"{file}::{test}" for file, test in named if test not in defined_in(file)]
    assert missing == []


def test_every_cpp_test_and_benchmark_that_is_named_is_there() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "cpp").rglob("*.cpp")}
    named = re.findall(r"`(\w+_test\.cpp): (\w+)`", PAGE)
    assert len(named) >= 3
    assert [test for file, test in named if f", {test})" not in sources[file]] == []
    assert all((ROOT / path).is_file() for path in re.findall(r"`(benchmarks/\w+\.py)`", PAGE))


def test_every_weakness_has_its_row_and_something_that_shows_it() -> None:
    rows = re.findall(r"^\| (\d+) \| [^|]+ \| [^|]+ \| (.*) \|$", PAGE, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, 61))
    assert all(re.search(r"test|bench", shown) for _, shown in rows)
