"""The repository's shape, held as tests."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

import trajkit
from trajkit import _core

ROOT = Path(__file__).parent.parent
PACKAGES = {
    "trajkit": ROOT / "trajkit",
    "trajkit_shim": ROOT / "shim/trajkit_shim",
    "trajkit_rollout": ROOT / "shim/trajkit_rollout",
    "trajkit_train": ROOT / "examples/train/trajkit_train",
}
PUBLIC = [
    *(trajkit, trajkit.analysis, trajkit.learn, trajkit.packs, trajkit.plot),
    *(trajkit.turns, trajkit.view),
]
HEAVY = {
    *("duckdb", "httpx", "jinja2", "matplotlib", "pandas", "polars", "pyspark", "ray"),
    *("sglang", "starlette", "tokenizers", "torch", "transformers", "uvicorn"),
}
"""What no import of trajkit, and no --help, may load."""

REFUSED = {
    "trajkit": HEAVY | {"slime", "trajkit_shim", "trajkit_rollout", "trajkit_train"},
    "trajkit_shim": {"sglang", "torch", "trajkit_rollout", "trajkit_train"},
    "trajkit_rollout": {"sglang", "torch", "trajkit_train"},
    "trajkit_train": {"sglang"},
}
ALLOWED = {
    "cli": {"polars"},  # counting and grouping, of the extra `look`
    "cli/options.py": {"tokenizers", "transformers"},  # when a command is given one
    "export": {"slime", "torch", "verl"},  # in functions that return their objects
    "plot/figures.py": {"matplotlib"},  # in functions that return figures
    "torch": {"torch", "transformers"},  # an extra that no other part imports
    "view": {"polars"},
}
"""What a file of trajkit, or all in a folder, may import besides."""


def modules(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


@cache
def imports(path: Path) -> list[str]:
    """Every module that a file imports, at its top or inside a function."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def loaded_by(statement: str) -> set[str]:
    """The modules that a fresh interpreter holds after the statement."""
    done = subprocess.run(
        [sys.executable, "-c", f"{statement}\nimport sys; print(*sys.modules)"],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(str(path.parent) for path in PACKAGES.values())},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


EVERY_NAME = "import trajkit; [getattr(trajkit, name) for name in dir(trajkit)]"
HELP = (
    "import contextlib, io, trajkit.cli as cli\n"
    "with contextlib.redirect_stdout(io.StringIO()): cli.main(['--help'])\n"
)


@pytest.mark.parametrize(
    ("statement", "refused"),
    [
        (EVERY_NAME, {"pyarrow.compute"}),
        (HELP, HEAVY | {"numpy", "pyarrow"}),
        ("import trajkit_shim.cli", HEAVY),
        ("import trajkit_rollout.command", HEAVY),
        ("import trajkit_rollout.demo_command", HEAVY),
    ],
)
def test_what_is_not_loaded_before_it_is_used(statement, refused):
    assert loaded_by(statement).isdisjoint(refused)


def test_importing_trajkit_loads_its_dependencies_only():
    loaded = loaded_by(EVERY_NAME) - loaded_by("pass")
    third_party = {
        top
        for top in (name.partition(".")[0] for name in loaded)
        if top not in sys.stdlib_module_names and not re.match("_|cython_runtime", top)
    }
    assert third_party == {"numpy", "orjson", "pyarrow", "trajkit"}


@pytest.mark.parametrize("package", PACKAGES)
def test_no_file_imports_what_its_package_must_not(package):
    for path in modules(package):
        place = path.relative_to(PACKAGES[package])
        allowed = set()
        if package == "trajkit":
            for part in (place, *place.parents):
                allowed |= ALLOWED.get(part.as_posix(), set())
        for name in imports(path):
            top, *rest = name.split(".")
            said = f"{path.relative_to(ROOT)} imports {name}"
            assert top not in REFUSED[package] - allowed, said
            if top in PACKAGES.keys() - {package}:
                assert not any(part.startswith("_") for part in rest), said


def allowed_imports(package: str) -> dict[str, set[str]]:
    """ARCHITECTURE.md's list: each part of a package and the parts on lines above it."""
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    listed = re.search(rf"```text\n# {package}\n(.*?)```", text, re.DOTALL)
    assert listed
    allowed: dict[str, set[str]] = {}
    for line in listed[1].splitlines():
        allowed |= {part: {*allowed} for part in line.split()}
    return allowed


def part_of(module: str) -> str:
    """The package directly below the top, or the module that lies there."""
    return module.split(".")[1] if "." in module else "__init__"


def module_name(package: str, path: Path) -> str:
    parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_is_listed_below_them(package):
    allowed = allowed_imports(package)
    names = {module_name(package, path) for path in modules(package)}
    wrong = []
    for path in modules(package):
        part = part_of(module_name(package, path))
        if part == "__init__":
            continue
        for name in imports(path):
            if name.split(".")[0] != package:
                continue
            known = name if name in names else name.rpartition(".")[0]
            target = part_of(known if known != package else name)
            # the command line also uses the public names
            public = "__init__" if part == "cli" else part
            if target not in {part, public, "_core", *allowed[part]}:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert wrong == []
    assert allowed.keys() == {part_of(name) for name in names} - {"__init__"}


def test_every_package_is_listed_for_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {
        ".".join([name, *path.parent.relative_to(folder).parts])
        for name, folder in PACKAGES.items()
        # an example, to copy
        if name != "trajkit_train"
        for path in folder.rglob("__init__.py")
    }
    assert found == set(listed["tool"]["setuptools"]["packages"])


def test_every_kernel_has_a_stub():
    stub = ast.parse((ROOT / "trajkit/_core.pyi").read_text())
    stubbed = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    kernels = {
        name
        for name, value in vars(_core).items()
        if type(value).__name__ == "cython_function_or_method"
    }
    assert kernels == stubbed


def test_public_names_are_those_that_type_checkers_see():
    for package in PUBLIC:
        tree = ast.parse(Path(package.__file__).read_text())
        [block] = [one for one in tree.body if ast.unparse(one).startswith("if TYPE")]
        names = {name.asname for one in block.body for name in one.names}
        assert names <= set(dir(package))
        assert [name for name in dir(package) if not hasattr(package, name)] == []


def assert_documented(value: object) -> None:
    """It says what it does; a function also what each parameter is, a class each method."""
    text = inspect.getdoc(value)
    assert text, value
    if inspect.isclass(value):
        for name, method in vars(value).items():
            if inspect.isfunction(method) and not name.startswith("_"):
                assert inspect.getdoc(method), method
    elif inspect.isroutine(value) and "; see `" not in text:
        for parameter in inspect.signature(value).parameters:
            # a line of its own, or one that names several
            line = rf"^(?:[\w*]+, )*\*{{0,2}}{parameter}\b"
            assert re.search(line, text, re.MULTILINE), (value, parameter)


@pytest.mark.parametrize("package", PUBLIC, ids=lambda package: package.__name__)
def test_public_names_are_documented(package):
    for name in dir(package):
        value = getattr(package, name)
        if inspect.isroutine(value) or inspect.isclass(value):
            assert_documented(value)


def test_no_file_names_a_place_on_somebody_s_machine():
    place = r"/(home|root|Users)/\w"
    found = subprocess.run(
        ["git", "grep", "--untracked", "-InE", place],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    # 1: no line was found
    assert (found.returncode, found.stdout) == (1, "")
