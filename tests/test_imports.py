"""Imports go one way, module by module: what a package may import of ours, and no circle."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAY_IMPORT = {  # beside itself
    "formats": set(),
    "kernels": {"formats"},
    "parallel": set(),
    "guidance": {"formats"},
    "models": {"formats", "kernels", "parallel", "guidance"},
    "rollout": {"formats", "kernels", "parallel", "guidance", "models"},
    "training": {"formats", "guidance", "models", "parallel", "rollout", "rl", "analysis"},
    "rl": {"formats", "guidance", "models", "parallel", "rollout", "training", "analysis"},
    "analysis": {
        "formats", "kernels", "parallel", "guidance", "models", "rollout", "training", "rl",
    },  # all but sweeps and experiments
    "sweeps": {"rl", "analysis"},
}  # fmt: skip
MODULES = sorted((ROOT / "trace_jax").rglob("*.py"))


def name_of(path):
    """Dotted name of a module; a package's __init__ has the package's."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path):
    """Dotted names of ours that a module imports anywhere, also inside functions."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in names if name.split(".")[0] in ("trace_jax", "experiments", "configs")}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_package_imports_only_what_lies_below_it(path):
    own = path.relative_to(ROOT / "trace_jax").parts[0]
    for name in imports_of(path):
        top, package = name.split(".")[:2]
        assert top == "trace_jax", f"{name_of(path)} imports {name}: commands lie above the package"
        assert package in {own, *MAY_IMPORT[own]}, f"{name_of(path)} imports {name}"


def test_no_module_imports_itself_through_others():
    names = {name_of(path) for path in MODULES}

    def module(name):  # "a.b.function" -> "a.b"
        return name if name in names else name.rpartition(".")[0]

    graph = {name_of(p): {module(name) for name in imports_of(p)} for p in MODULES}
    assert len(list(TopologicalSorter(graph).static_order())) >= len(MODULES)


def test_every_package_is_in_the_table():
    packages = {path.parent.name for path in (ROOT / "trace_jax").glob("*/__init__.py")}
    assert packages == set(MAY_IMPORT)
