"""The repository's shape, held as tests."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
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
    trajkit,
    trajkit.analysis,
    trajkit.learn,
    trajkit.packs,
    trajkit.plot,
    trajkit.recorder,
    trajkit.turns,
    trajkit.view,
]

# What no import of trajkit, and no --help, may load.
HEAVY = {
    "duckdb",
    "httpx",
    "jinja2",
    "matplotlib",
    "pandas",
    "polars",
    "pyspark",
    "ray",
    "sglang",
    "starlette",
    "tokenizers",
    "torch",
    "transformers",
    "uvicorn",
}


def sources() -> Iterator[Path]:
    """Everything that people wrote here, data files aside."""
    for name in (
        ".ci",
        "_native",
        "benchmarks",
        "examples",
        "shim",
        "tests",
        "trajkit",
    ):
        for path in (ROOT / name).rglob("*"):
            if path.suffix in {
                "",
                ".jinja",
                ".md",
                ".pxd",
                ".pxi",
                ".py",
                ".pyi",
                ".pyx",
            }:
                yield path
    yield from ROOT.glob("*.*")


def modules(package: str) -> list[Path]:
    return sorted(PACKAGES[package].rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert node.level == 0
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loaded_by(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter holds after the statement."""
    return {name.partition(".")[0] for name in modules_after(statement)}


def modules_after(statement: str) -> list[str]:
    code = f"{statement}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": ":".join(str(path.parent) for path in PACKAGES.values())},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


EVERY_NAME = "import trajkit; [getattr(trajkit, name) for name in dir(trajkit)]"


COMMANDS = (
    "import contextlib, io, trajkit.cli as cli\n"
    "with contextlib.redirect_stdout(io.StringIO()): cli.main(['--help'])\n"
)


def test_the_help_loads_no_table():
    heavy = {"numpy", "polars", "pyarrow"}
    assert heavy.isdisjoint(loaded_by(COMMANDS))


@pytest.mark.parametrize("statement", [EVERY_NAME])
def test_importing_trajkit_loads_its_dependencies_only(statement):
    third_party = {
        name
        for name in loaded_by(statement) - loaded_by("pass")
        if name not in sys.stdlib_module_names
        and not re.match("_|cython_runtime", name)
    }
    assert third_party == {"numpy", "orjson", "pyarrow", "trajkit"}


def test_importing_trajkit_leaves_the_compute_functions_alone():
    assert "pyarrow.compute" not in modules_after(EVERY_NAME)


@pytest.mark.parametrize(
    "module",
    [
        "trajkit_shim.cli",
        "trajkit_rollout.command",
        "trajkit_rollout.demo_command",
    ],
)
def test_commands_load_nothing_heavy_before_they_run(module):
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


@pytest.mark.parametrize("path", modules("trajkit"), ids=lambda path: path.name)
def test_trajkit_imports_nothing_heavy_and_never_the_shim(path):
    refused = HEAVY | PACKAGES.keys() - {"trajkit"}
    if path == ROOT / "trajkit/cli/options.py":
        # when a command is given one, and nowhere else
        refused -= {"tokenizers", "transformers"}
    if path == ROOT / "trajkit/engines.py":
        refused -= {"ray"}
    if path.parent.name in ("analysis", "view", "cli"):
        # counting and grouping, of the extra `look`
        refused -= {"polars"}
    if path.parent == ROOT / "trajkit/export":
        # in functions that return objects of these libraries
        refused -= {"slime", "torch", "verl"}
    if path == ROOT / "trajkit/plot/figures.py":
        # an extra, in functions that return figures
        refused -= {"matplotlib"}
    if path.parent == ROOT / "trajkit/torch":
        # an extra that no other part imports
        refused -= {"torch", "transformers"}
    for name in imports(path):
        assert name.partition(".")[0] not in refused


@pytest.mark.parametrize(
    ("package", "refused"),
    [
        ("trajkit_shim", {"sglang", "torch", "trajkit_rollout", "trajkit_train"}),
        ("trajkit_rollout", {"sglang", "torch", "trajkit_train"}),
        ("trajkit_train", {"sglang"}),
    ],
)
def test_the_shim_and_the_training_demo_import_public_names_only(package, refused):
    for path in modules(package):
        for name in imports(path):
            top, *rest = name.split(".")
            assert top not in refused, f"{path.relative_to(ROOT)} imports {name}"
            if top in PACKAGES.keys() - {package}:
                private = [part for part in rest if part.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)} imports {name}"


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


def module_name(package: str, path: Path) -> str:
    parts = path.relative_to(PACKAGES[package]).with_suffix("").parts
    return ".".join([package, *(part for part in parts if part != "__init__")])


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


def public_objects() -> dict[str, object]:
    """Public functions and classes by dotted name."""
    return {
        f"{package.__name__}.{name}": getattr(package, name)
        for package in PUBLIC
        for name in dir(package)
    }


def public_functions() -> list[str]:
    return [
        name for name, value in public_objects().items() if inspect.isroutine(value)
    ]


def public_classes() -> dict[str, type]:
    return {n: value for n, value in public_objects().items() if inspect.isclass(value)}


def public_methods() -> list[object]:
    return [
        pytest.param(method, id=f"{name}.{method_name}")
        for name, value in public_classes().items()
        for method_name, method in vars(value).items()
        if inspect.isfunction(method) and not method_name.startswith("_")
    ]


@pytest.mark.parametrize("name", public_functions())
def test_public_functions_document_every_parameter(name):
    function = public_objects()[name]
    text = inspect.getdoc(function)
    assert text
    if "; see `" in text:
        return
    assert "Parameters\n----------" in text
    for parameter in inspect.signature(function).parameters:
        # a line of its own, or one that names several
        assert re.search(rf"^(?:[\w*]+, )*\*{{0,2}}{parameter}\b", text, re.MULTILINE)


@pytest.mark.parametrize("method", public_methods())
def test_public_methods_are_documented(method):
    assert inspect.getdoc(method)


@pytest.mark.parametrize("name", public_classes())
def test_public_classes_are_documented(name):
    assert inspect.getdoc(public_objects()[name])


def test_no_file_names_a_place_on_somebody_s_machine():
    place = re.compile(r"/(?:home|root|Users)/\w")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line}"
        for path in sources()
        if path.is_file()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if place.search(line)
    ]
    assert found == []
