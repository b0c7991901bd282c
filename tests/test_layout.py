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
PACKAGES = {"trajkit": ROOT / "trajkit", "trajkit_shim": ROOT / "shim/trajkit_shim"}

# What no import of trajkit, and no --help, may load.
HEAVY = {
    "duckdb",
    "httpx",
    "jinja2",
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
    for name in (".ci", "_native", "benchmarks", "shim", "tests", "trajkit"):
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
    code = f"{statement}; import sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'shim'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize("module", ["trajkit", "trajkit.cli"])
def test_importing_trajkit_loads_numpy_and_pyarrow_only(module):
    third_party = {
        name
        for name in loaded_by(f"import {module}") - loaded_by("pass")
        if name not in sys.stdlib_module_names
        and not re.match("_|cython_runtime", name)
    }
    assert third_party == {"numpy", "pyarrow", "trajkit"}


def test_importing_trajkit_leaves_the_compute_functions_alone():
    assert "pyarrow.compute" not in modules_after("import trajkit")


def test_the_shim_s_commands_load_nothing_heavy_before_they_run():
    assert loaded_by("import trajkit_shim.cli").isdisjoint(HEAVY)


@pytest.mark.parametrize("path", modules("trajkit"), ids=lambda path: path.name)
def test_trajkit_imports_nothing_heavy_and_never_the_shim(path):
    refused = HEAVY | {"trajkit_shim"}
    if path == ROOT / "trajkit/cli/tokenizer.py":
        # when a command is given one, and nowhere else
        refused -= {"tokenizers", "transformers"}
    if path == ROOT / "trajkit/ray.py":
        refused -= {"ray"}
    if path == ROOT / "trajkit/io_polars.py":
        # where it is installed, for files that are not small
        refused -= {"polars"}
    for name in imports(path):
        assert name.partition(".")[0] not in refused


@pytest.mark.parametrize("path", modules("trajkit_shim"), ids=lambda path: path.name)
def test_the_shim_imports_public_names_of_trajkit_only(path):
    for name in imports(path):
        top, *rest = name.split(".")
        assert top not in {"sglang", "torch"}
        if top == "trajkit":
            assert not any(part.startswith("_") for part in rest), name


def test_errors_import_nothing_and_schema_nothing_of_trajkit():
    assert list(imports(ROOT / "trajkit/errors.py")) == []
    names = set(imports(ROOT / "trajkit/schema.py"))
    assert not any(name.startswith("trajkit") for name in names)


def test_every_package_is_listed_for_the_wheel():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())
    found = {
        ".".join([name, *path.parent.relative_to(folder).parts])
        for name, folder in PACKAGES.items()
        for path in folder.rglob("__init__.py")
    }
    assert found == set(listed["tool"]["setuptools"]["packages"])


def test_the_stub_of_the_core_is_true():
    checked = subprocess.run(
        [
            *(sys.executable, "-m", "mypy.stubtest"),
            *("--mypy-config-file", "pyproject.toml", "trajkit._core"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_kernel_has_a_stub():
    stub = ast.parse((ROOT / "trajkit/_core.pyi").read_text())
    stubbed = {node.name for node in stub.body if isinstance(node, ast.FunctionDef)}
    kernels = {
        name
        for name, value in vars(_core).items()
        if type(value).__name__ == "cython_function_or_method"
    }
    assert kernels == stubbed


def test_public_names_are_sorted_and_there():
    assert trajkit.__all__ == sorted(trajkit.__all__)
    assert len(set(trajkit.__all__)) == len(trajkit.__all__)
    assert [name for name in trajkit.__all__ if not hasattr(trajkit, name)] == []


def public_functions() -> list[str]:
    return [n for n in trajkit.__all__ if inspect.isroutine(getattr(trajkit, n))]


def public_methods() -> list[object]:
    return [
        pytest.param(method, id=f"{name}.{method_name}")
        for name in trajkit.__all__
        if inspect.isclass(getattr(trajkit, name))
        for method_name, method in vars(getattr(trajkit, name)).items()
        if inspect.isfunction(method) and not method_name.startswith("_")
    ]


@pytest.mark.parametrize("name", public_functions())
def test_public_functions_document_every_parameter(name):
    text = inspect.getdoc(getattr(trajkit, name))
    assert text
    if "; see `" in text:
        return
    assert "Parameters\n----------" in text
    for parameter in inspect.signature(getattr(trajkit, name)).parameters:
        # a line of its own, or one that names several
        assert re.search(rf"^(?:[\w*]+, )*\*{{0,2}}{parameter}\b", text, re.MULTILINE)


@pytest.mark.parametrize("method", public_methods())
def test_public_methods_are_documented(method):
    assert inspect.getdoc(method)


@pytest.mark.parametrize(
    "name", [n for n in trajkit.__all__ if inspect.isclass(getattr(trajkit, n))]
)
def test_public_classes_are_documented(name):
    assert inspect.getdoc(getattr(trajkit, name))


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
