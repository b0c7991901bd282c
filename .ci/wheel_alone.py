"""Tries an installed wheel: what it loads, what it brings along, that it works."""

import importlib.metadata
import importlib.resources
import pathlib
import subprocess
import sys
import sysconfig
import tempfile

before = {name.partition(".")[0] for name in sys.modules}

import trajkit as tk  # noqa: E402

third_party = {
    top
    for top in {name.partition(".")[0] for name in sys.modules} - before
    if top not in sys.stdlib_module_names
}
installed = {d.name for d in importlib.metadata.distributions()} - {"pip", "setuptools"}
assert installed == {"trajkit", "numpy", "pyarrow"}, installed
