"""Compiles _native/ into trajkit._core. Everything static is in pyproject.toml."""

import os
from glob import glob

from Cython.Build import cythonize
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("TRAJKIT_DEBUG") == "1"
SANITIZE = os.environ.get("TRAJKIT_SANITIZE") == "1"

build = "sanitize" if SANITIZE else "debug" if DEBUG else "release"
optimise = {
    "release": ["-O3", "-g0"],
    "debug": ["-O0", "-g"],
    # CPython's own flags wrap signed overflow, which would hide it
    "sanitize": ["-O1", "-g", "-fno-wrapv"],
}[build]
sanitize = ["-fsanitize=address,undefined"] if SANITIZE else []
checked = build != "release"

core = Extension(
    "trajkit._core",
    sources=["_native/core.pyx"],
    depends=sorted(
        glob("_native/**/*.p*", recursive=True)
    ),  # rebuild on a change; ship in the sdist
    define_macros=[("TRAJKIT_BUILD", f'"{build}"')],
    extra_compile_args=optimise + sanitize,
    extra_link_args=sanitize,
)


class translate_and_build(build_ext):
    """Cython translates only where something is built, not for the package's metadata."""

    def run(self):
        (translated,) = cythonize(
            self.extensions,
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
                "show_performance_hints": not checked,  # they ask for unchecked loops
            },
        )
        core.sources = translated.sources
        super().run()


setup(ext_modules=[core], cmdclass={"build_ext": translate_and_build})
