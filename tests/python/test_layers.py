"""The house rules that a reader relies on: layers, names and sizes, checked over the sources themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import ROOT

import prefixcache

PACKAGE = ROOT / "python" / "prefixcache"
CSRC = ROOT / "csrc"
MOST_LINES = 500

# Bottom first: a module may import those above it in this list, and no other of the package.
PYTHON_LAYERS = [
    {"_build_info", "errors", "_sizes", "_core", "_doors"},
    {"_directory"},
    {"maintenance"},
    {"_tables"},
    {"cli"},
    {"_check_mlx", "_layer_state", "_keys", "_fingerprint", "_results"},
    {"_handlers", "_handlers.base"},
    {"_handlers.kv", "_handlers.rotating", "_handlers.chunked", "_handlers.arrays", "_handlers.cache_list"},
    {"_handlers.quantized", "_handlers.deepseek_v41", "_handlers.minimax_m3", "_handlers.turboquant_codecs"},
    {"_handlers.mlx_vlm_fields", "_handlers.turboquant"},
    {f"_handlers.{name}" for name in ("mlx_vlm_kv", "mlx_vlm_qsa", "mlx_vlm_rotating", "mlx_vlm_states")},
    {"_handlers.turboquant_hybrid"},
    {"_handlers.mlx_vlm"},
    {"_registry"},
    {"_parts"},
    {"interface", "stats", "observability", "recovery", "_omlx", "_rotating_subclass"},
    {"_omlx.cache_types", "_omlx.sized_arrays", "_omlx.turboquant_states"},
    {"_omlx.live_layers"},
    {"_omlx.block_hash", "_omlx.blocks", "_omlx.layer_dicts", "_omlx.tuples", "_omlx.hot_budget", "_omlx.ssd_index"},
    {"_omlx.block_pool"},
    {"_omlx.block_tables"},
    {"_omlx.blobs"},
    {"_omlx.shown_blocks", "_omlx.ssd_stats", "_omlx.part_tuples"},
    {"_omlx.part_blocks", "_omlx.layer_signature"},
    {"_omlx.snapshot_layers", "_omlx.snapshot_sessions"},
    {"_omlx.handler_base"},
    {"_omlx.handlers_rows", "_omlx.handlers_whole"},
    {"paged_cache", "type_handlers", "boundary_snapshot_store"},
    {"type_registry", "paged_ssd_cache"},
    {"hybrid_cache"},
    {"_boundary", "_checkpoints", "_record", "_window_rows"},
    {"_restore", "_storing"},
    {"_recorder"},
    {"cache"},
    {"", "_mlx_lm_recording"},
    {"mlx_lm", "__main__"},
    {"_omlx.foreign_calls"},
    {"_omlx.block_data", "_omlx.own_blocks", "_omlx.prefix_index"},
    {"_omlx.foreign_blocks", "_omlx.request_tables"},
    {"_omlx.private_names"},
    {"_omlx.tensor_store"},
    {"prefix_cache"},
    {"factory"},
]
# oMLX's module paths: callers of that surface speak in names of cache classes.
OMLX = {"type_handlers", "type_registry", "hybrid_cache", "prefix_cache", "paged_ssd_cache", "_rotating_subclass"}
# What the sources of a folder may include besides themselves and the public headers.
CSRC_FOLDERS = {
    "arrays": set[str](),
    "hash": {"arrays"},
    "layout": {"hash"},
    "gather": {"hash", "arrays"},
    "env": {"gather"},
    "store": {"hash", "layout", "gather", "arrays"},
    "bindings": {"arrays"},
    "include": set[str](),
}


def sources(folder: Path, *patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in folder.rglob(pattern) if "__pycache__" not in path.parts)


def modules() -> dict[str, Path]:
    names = {}
    for path in sources(PACKAGE, "*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        names[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return names


def imports(path: Path) -> Iterator[str]:
    """The modules of this package that a file names, wherever in the file; "" is the package itself."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}: relative import in line {node.lineno}"
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("import_module", "importlib.import_module"):
            assert isinstance(node.args[0], ast.Constant), f"{path.name}: import of a computed name"
            names = [str(node.args[0].value)]
        else:
            continue
        yield from (name[len("prefixcache") :].lstrip(".") for name in names if name.split(".")[0] == "prefixcache")


def layer(module: str) -> int:
    found = [number for number, names in enumerate(PYTHON_LAYERS) if module in names]
    assert found, f"prefixcache.{module} has no layer yet: add it to PYTHON_LAYERS"
    return found[0]


@pytest.mark.parametrize("module", sorted(modules()))
def test_python_imports_downwards_only(module: str) -> None:
    # The package's front page names everything; running it costs nothing to those below.
    upwards = {name for name in imports(modules()[module]) if layer(name) >= layer(module)}
    assert upwards == set()


def test_the_walk_sees_the_imports() -> None:
    """The rule above is only worth something if the walk finds what is there."""
    assert {"_core", "_boundary", "_registry"} <= set(imports(PACKAGE / "_restore.py"))
    assert "_fingerprint" in set(imports(PACKAGE / "__init__.py"))


@pytest.mark.parametrize("folder", sorted(path.name for path in CSRC.iterdir() if path.is_dir()))
def test_includes_stay_in_their_layer(folder: str) -> None:
    assert folder in CSRC_FOLDERS, f"csrc/{folder} has no layer yet: add it to CSRC_FOLDERS"
    allowed = CSRC_FOLDERS[folder] | {folder, "prefixcache"}
    for path in sources(CSRC / folder, "*.h", "*.cpp", "*.in", "*.mm"):
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(encoding="utf-8"), re.M):
            where = included.split("/")[0]
            assert "/" in included, f"{path}: include {included} with its folder"
            assert where in allowed, f"{path} must not include {included}"
            there = (CSRC / included).is_file() or (CSRC / f"{included}.in").is_file()  # .in: made by the build
            assert where == "prefixcache" or there, f"{path}: no file {included}"


@pytest.mark.parametrize("path", sources(CSRC / "include", "*.h"), ids=lambda path: path.name)
def test_public_headers_say_how_they_may_be_used(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.startswith(f"// {path.name}: "), "the first line says what the header is"
    assert "#pragma once" in text
    if path.name not in ("prefixcache.h", "api.h", "version.h"):
        head = text[: text.index("#pragma once")]
        assert "// Threads: " in head
        assert re.search(r"^// (Owns|Units|Errors): ", head, re.M)


def test_arrays_are_asked_for_their_bytes_by_one_thread_at_a_time() -> None:
    # Besides the lock's own file, places that ask arrays of their own.
    allowed = {"shared_array.cpp", "mlx_compat.h", "gather_plan.cpp", "slab_memory.cpp"}
    asking = {
        path.name
        for path in sources(CSRC, "*.h", "*.cpp", "*.in")
        if re.search(r"(\.|->)(data<|is_available\(\))", path.read_text(encoding="utf-8"))
    }
    assert asking == allowed


def test_no_python_below_the_bindings() -> None:
    for path in sources(CSRC, "*.h", "*.cpp", "*.in"):
        if path.relative_to(CSRC).parts[0] != "bindings":
            assert not re.search(r"nanobind|Python\.h|PyObject", path.read_text(encoding="utf-8")), path


CACHE_CLASSES = re.compile(r"\b(\w*KVCache|ArraysCache|CacheList|MambaCache|LayerCache|\w*PoolingCache)\b(?!Handler)")


@pytest.mark.parametrize("path", sources(CSRC, "*.h", "*.cpp", "*.in"), ids=lambda path: path.name)
def test_cpp_has_never_heard_of_a_cache_class(path: Path) -> None:
    assert CACHE_CLASSES.findall(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", sorted(modules()))
def test_cache_classes_are_named_in_the_registry_and_their_handler_only(module: str) -> None:
    if module == "_registry" or module.startswith(("_handlers.", "_omlx.")) or module in OMLX:
        return
    assert CACHE_CLASSES.findall(modules()[module].read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("module", sorted(name for name in modules() if name.startswith("_handlers.")))
def test_a_handler_file_names_its_own_family_only(module: str) -> None:
    families = {
        "_handlers.base": set[str](),
        "_handlers.kv": {"KVCache", "ConcatenateKVCache"},
        "_handlers.quantized": {"QuantizedKVCache"},
        "_handlers.rotating": {"RotatingKVCache"},
        "_handlers.chunked": {"ChunkedKVCache"},
        "_handlers.arrays": {"ArraysCache"},
        "_handlers.cache_list": {"CacheList"},
        "_handlers.deepseek_v41": {"LayerCache", "DeepseekV41LayerCache"},
        "_handlers.minimax_m3": {"MiniMaxM3KVCache", "KVCache"},
        "_handlers.mlx_vlm_fields": set[str](),
        "_handlers.mlx_vlm_kv": {"SimpleKVCache", "HyV4KVCache", "RingSlidingKVCache"},
        "_handlers.mlx_vlm_qsa": {"QSAKVCache"},
        "_handlers.mlx_vlm_rotating": {"BufferedRotatingKVCache", "ChunkedKVCache"},
        "_handlers.mlx_vlm_states": {"ArraysCache", "PoolingCache"},
        "_handlers.turboquant_codecs": set[str](),
        "_handlers.turboquant": {"TurboQuantKVCache", "KVCache"},
        "_handlers.turboquant_hybrid": {"HybridQuantKVCache", "KVCache"},
    }
    if module == "_handlers.mlx_vlm":
        return  # a part of the registry
    assert module in families, f"say in this test which classes {module} may name"
    assert set(CACHE_CLASSES.findall(modules()[module].read_text(encoding="utf-8"))) <= families[module]


@pytest.mark.parametrize("module", sorted(modules()))
def test_no_blanket_except(module: str) -> None:
    if module == "_omlx.foreign_calls":
        return  # one function, for code that is not ours
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert not re.search(r"\b(Exception|BaseException|everything)\b", caught), f"line {node.lineno}: {caught}"


@pytest.mark.parametrize("module", sorted(modules()))
def test_annotations_are_postponed_and_modules_documented(module: str) -> None:
    tree = ast.parse(modules()[module].read_text(encoding="utf-8"))
    if module == "_build_info":
        return
    assert ast.get_docstring(tree)
    if len(tree.body) > 1:
        assert "from __future__ import annotations" in modules()[module].read_text(encoding="utf-8")


def test_files_stay_readable() -> None:
    files = [*sources(PACKAGE, "*.py"), *sources(CSRC, "*.h", "*.cpp", "*.in")]
    lengths = {str(path): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {path: length for path, length in lengths.items() if length > MOST_LINES} == {}
    assert len(files) > 50


def test_public_names_exist() -> None:
    assert all(hasattr(prefixcache, name) for name in prefixcache.__all__)
    assert prefixcache.__all__ == sorted(prefixcache.__all__, key=lambda name: (not name.isupper(), name))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = prefixcache.nothing


def test_lines_of_the_sources_stay_short() -> None:
    for path in [*sources(PACKAGE, "*.py"), *sources(CSRC, "*.h", "*.cpp", "*.in")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 120, f"{path}:{number}"
            assert line == line.rstrip(), f"{path}:{number}"
            assert "\t" not in line, f"{path}:{number}"
