"""Compiles _native/ into trajkit._core. Everything static is in pyproject.toml."""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup

DEBUG = os.environ.get("TRAJKIT_DEBUG") == "1"
SANITIZE = os.environ.get("TRAJKIT_SANITIZE") == "1"

optimise = ["-O0", "-g"] if DEBUG else ["-O1", "-g"] if SANITIZE else ["-O3", "-g0"]
sanitize = ["-fsanitize=address,undefined"] if SANITIZE else []
checked = DEBUG or SANITIZE

core = Extension(
    "trajkit._core",
    sources=["_native/_core.pyx"],
    depends=sorted(glob("_native/*.p*")),  # rebuild on a change; ship in the sdist
    extra_compile_args=optimise + sanitize,
    extra_link_args=sanitize,
)

setup(
    ext_modules=cythonize(
        [core],
        include_path=["_native"],
        build_dir="build/cython",
        force=True,  # cythonize does not notice a changed directive
        annotate=DEBUG,
        compiler_directives={
            "language_level": 3,
            "boundscheck": checked,
            "initializedcheck": checked,
            "wraparound": False,
            "cdivision": True,
            "autotestdict": False,
        },
    ),
)
