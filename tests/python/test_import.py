"""import prefixcache: light, and clear about the MLX that it needs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import prefixcache
from prefixcache._build_info import MLX_VERSION

# Where the package under test lies, be it a source tree or an installed wheel.
SITE = str(Path(prefixcache.__file__).resolve().parents[1])
HEAVY = ("mlx_lm", "mlx_vlm", "transformers", "numpy", "torch", "huggingface_hub", "safetensors", "mlx.nn", "asyncio")


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": SITE}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )  # fmt: skip


def loaded_by(code: str) -> set[str]:
    done = run(f"import json, sys\n{code}\nprint(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def heavy(modules: set[str]) -> set[str]:
    return {name for name in modules if any(name == one or name.startswith(one + ".") for one in HEAVY)}


def test_nothing_heavy_is_imported() -> None:
    before = loaded_by("import mlx.core")
    assert heavy(loaded_by("import mlx.core, prefixcache") - before) == set()


def test_nothing_heavy_is_imported_by_opening_and_using_a_cache() -> None:
    """Live objects are recognised by the names of their classes, so the package they come from is never imported."""
    code = """
import tempfile, types, mlx.core as mx
module = types.ModuleType("mlx_lm.models.cache")
code = '''
class KVCache:
    def __init__(self):
        self.keys = self.values = None
        self.offset = 0
    def update_and_fetch(self, keys, values): ...
'''
exec(compile(code, "made up", "exec"), module.__dict__)
def filled(n):
    cache = module.KVCache()
    if n:
        cache.keys, cache.values, cache.offset = mx.ones((1, 1, n, 4)), mx.ones((1, 1, n, 4)), n
    return cache
import prefixcache
with tempfile.TemporaryDirectory() as folder:
    with prefixcache.PrefixCache.open(folder, namespace="a", caches=[filled(0)], block_size=4) as cache:
        assert cache.store(list(range(10)), [filled(10)]).stored_tokens == 10
        hit = cache.fetch(list(range(11)))
        assert hit.cached_tokens == 10 and type(hit.caches[0]) is module.KVCache
"""
    assert heavy(loaded_by(code) - loaded_by("import tempfile, mlx.core")) == set()


TIMING = """
import time
import mlx.core
start = time.process_time()
import prefixcache
print(time.process_time() - start)
"""


def test_it_costs_at_most_100_ms_more_than_mlx() -> None:
    best = float("inf")
    for _ in range(20):
        done = run(TIMING)
        assert done.returncode == 0, done.stderr
        # Processor time, and the least of several runs: other work on the machine only ever adds to it.
        best = min(best, float(done.stdout))
        if best <= 0.1:
            break
    assert best <= 0.1


FAKE_MLX = """
import sys, types
package, core = types.ModuleType("mlx"), types.ModuleType("mlx.core")
package.__path__, package.core = [], core
{version}
sys.modules.update({{"mlx": package, "mlx.core": core}})
try:
    import prefixcache
except ImportError as error:
    print(error)
assert "prefixcache._core" not in sys.modules
"""


def test_another_mlx_is_a_clear_error() -> None:
    """Before the extension is loaded: it would refuse every array, with a message about argument types."""
    for version, shown in (("core.__version__ = '0.99.1'", "0.99.1"), ("", "unknown")):
        done = run(FAKE_MLX.format(version=version))
        assert done.returncode == 0, done.stderr
        message = done.stdout
        assert f"MLX {shown} is installed" in message
        assert f"built for MLX {MLX_VERSION}" in message
        assert f"pip install 'mlx=={MLX_VERSION}'" in message


def test_the_version_is_the_builds() -> None:
    assert prefixcache.__version__
    assert prefixcache.__version__ == prefixcache._build_info.VERSION
