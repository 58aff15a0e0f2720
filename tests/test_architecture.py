"""Imports go one way: ground <- rooms <- config <- run, evaluate <- launch; heavy libraries are imported where they are built."""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from opsd.registry import FOLDERS, kinds, lookup

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "opsd"
ROOMS = set(FOLDERS.values())
ABOVE = {
    "config",
    "cross_checks",
    "inputs",
    "job",
    "preflight",
    "milestones",
    "run",
    "torchrun",
    "scorers",
    "view",
    "evaluate",
    "launch",
}  # what stands over the rooms
HEAVY = {
    "torch",
    "transformers",
    "peft",
    "mlflow",
    "datasets",
    "submitit",
    "vllm",
    "deepspeed",
    "safetensors",
    "math_verify",
    "scipy",
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "assets" not in path.parts)
LEVEL = {
    **{"config": 2, "cross_checks": 2},
    **dict.fromkeys(("inputs", "evaluate", "job", "milestones", "preflight", "run", "scorers", "torchrun", "view"), 3),
    "launch": 4,
}


def part_of(path: Path) -> str:
    """The room, `launch`, or the ground module that a file is."""
    inside = path.relative_to(PACKAGE).with_suffix("").parts
    return "opsd" if inside == ("__init__",) else inside[0]


def level(part: str) -> int:
    return 1 if part in ROOMS else LEVEL.get(part, 0)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports(node: ast.AST, *, in_functions: bool) -> set[str]:
    """Dotted names of what is really imported below a node; blocks for the type checker left out."""
    found: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if is_type_checking(child) or (isinstance(child, ast.FunctionDef) and not in_functions):
            continue
        if isinstance(child, ast.Import):
            found |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom) and child.module:
            found |= {f"opsd.{alias.name}" for alias in child.names} if child.module == "opsd" else {child.module}
        found |= imports(child, in_functions=in_functions)
    return found


def parts_imported(path: Path) -> set[str]:
    own = imports(ast.parse(path.read_text()), in_functions=True)
    return {name.split(".")[1] for name in own if name.startswith("opsd.")}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    for other in parts_imported(path) - {part, "__version__"}:
        assert level(other) <= level(part), f"{path.name} ({part}) imports {other}, which stands above it"
        assert not (part in ROOMS and other in ROOMS), f"room {part} imports room {other}"


def test_the_ground_has_no_cycles() -> None:
    graph = {part_of(path): parts_imported(path) - {part_of(path)} for path in MODULES if level(part_of(path)) == 0}
    assert {"types", "registry", "seeding", "tracking", "checkpoints", "scoring"} <= set(graph)
    TopologicalSorter({part: others for part, others in graph.items()}).prepare()  # raises CycleError


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_heavy_libraries_are_imported_where_they_are_built(path: Path) -> None:
    named = {name.split(".")[0] for name in imports(ast.parse(path.read_text()), in_functions=False)}
    is_option = path.parent.name in ROOMS and (path.stem in kinds_of(path.parent.name) or path.stem == "base")
    light = {"registry", "types", "typed", "seeding", "tracking", "checkpoints", "endings", "ranks"}
    if is_option or part_of(path) in ABOVE | light:
        assert not named & HEAVY


def kinds_of(folder: str) -> list[str]:
    return kinds(next(group for group, name in FOLDERS.items() if name == folder))


def test_a_run_is_typed_without_heavy_libraries() -> None:
    code = """
import sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from opsd.config import to_run
from opsd.registry import FOLDERS, kinds, lookup
with initialize_config_dir(str(Path("conf").absolute()), version_base="1.3"):
    run = to_run(compose("config"))
for group in FOLDERS:
    for kind in kinds(group):
        if (Path("opsd") / FOLDERS[group] / kind).with_suffix(".py").read_text().count("@register("):
            lookup(group, kind)
print(run.loss.name, sorted(set(sys.argv[1:]) & {name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code, *HEAVY], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "forward_kl []"


def registered() -> list[tuple[str, str]]:
    return [
        (group, kind)
        for group, folder in FOLDERS.items()
        for kind in kinds(group)
        if f'@register("{group}", "{kind}")' in (PACKAGE / folder / f"{kind}.py").read_text()
    ]


@pytest.mark.parametrize(("group", "kind"), registered())
def test_options_hold_no_values(group: str, kind: str) -> None:
    """conf/ owns values: a default in a dataclass would be a second home."""
    from dataclasses import MISSING, fields, is_dataclass
    from typing import get_args, get_type_hints

    option = lookup(group, kind)
    nested = [part for hint in get_type_hints(option).values() for part in (hint, *get_args(hint)) if is_dataclass(part)]
    for cls in (option, *nested):
        for field in fields(cls):
            assert field.default is MISSING and field.default_factory is MISSING, f"{group}.{field.name} has a default"


def test_every_option_file_is_short() -> None:
    for path in [*MODULES, ROOT / "launch.py", ROOT / "evaluate.py"]:
        assert len(path.read_text().splitlines()) < 400, f"{path} is too long to be read at one sitting"
