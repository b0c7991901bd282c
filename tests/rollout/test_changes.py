"""Which changes of an agent are graded."""

import pytest

from trajkit_rollout.grade import LINK, choose

BEFORE = (
    *("it.py", "README", "setup.py", "test_it.py", "tests/test_a.py", "tests/data/b"),
    *("pkg/__init__.py", "pkg/a.py", "pkg/sub/__init__.py", "src/b.py", "src/b.js"),
    *("lib/tests/__init__.py", "lib/__init__.py", "Makefile", "app/main.py"),
    *("env/pyvenv.cfg", "env/bin/pytest", "vendor/a/a.go", "node_modules/a.js"),
    *("core/src/test/java/A.java", "lib/site-packages/a/__init__.py"),
    *("mono/package.json", "mono/test/a.js", "mono/a/test/a.js", "pkg/plugins/os.py"),
)
MODULES = ("json", "pytest", "pygments", "os")
NEW, GONE, PROGRAM, REPOSITORY = "100644", "000000", "100755", "160000"


def chosen(name, mode=NEW, target=None, editable=None):
    """``graded``, ``refused`` or ``risky``."""
    (verdict,) = choose({name: (mode, target)}, BEFORE, MODULES, editable).values()
    return verdict


@pytest.mark.parametrize(
    "name",
    [
        *("it.py", "README", "src/b.js", "pkg/a.py", "pkg/new.py", "lib/new.py"),
        *("pkg/sub/new/deep.py", "pkg/data.json", "pkg/json.txt", "app/main.py"),
        # inside a package, names of other modules hide none of them
        *("pkg/json.py", "pkg/pytest/__init__.py", "pkg/os.cpython-311.so"),
        *("mono/a/test/a.js", "pkg/plugins/b.py", "pkg/plugins/os.py"),
    ],
)
def test_files_and_packages_that_existed_are_graded(name):
    assert chosen(name) == "graded"


@pytest.mark.parametrize(
    "name",
    [
        # new, outside of every package
        *(
            "new.py",
            "new/__init__.py",
            "src/new.py",
            "app/new.js",
            "org/python/core.py",
        ),
        *("new.txt", "src/deep/new.txt", "python", "json.py", "pygments/__init__.py"),
        # tests and their settings
        *("test_it.py", "tests/test_a.py", "tests/data", "tests/new.py", "conftest.py"),
        *("pkg/conftest.py", "pkg/test_new.py", "pkg/new_test.py", "lib/tests/new.py"),
        *("pkg/__tests__/a.py", "pytest.ini", "tox.ini", "setup.cfg", "setup.py"),
        *("pyproject.toml", "Makefile", "package.json", "pkg/vitest.config.ts"),
        *("pkg/a.test.js", "pkg/a.spec.tsx", "pkg/a_test.go", "test/a.py", "spec/a.rb"),
        *("core/src/test/java/A.java", "pkg/b_test.exs", "test_data.json"),
        *("pkg/jest.config.json", "pkg/karma.conf.js", "pkg/a.cmake", "pkg/a.mak"),
        *("pkg/ATest.java", "pkg/a.snap", "pkg/testdata/a", "pkg/__mocks__/fs.js"),
        *("pkg/go.work", "pkg/pnpm-lock.yaml", "pkg/phpunit.xml", "pkg/build.sbt"),
        # what takes the place of other files
        *("lib/tests", "pkg/a.py/x.txt", "pkg/sub"),
        # what is installed in the workspace
        *("env/bin/pytest", "vendor/a/a.go", "node_modules/a.js"),
        "lib/site-packages/a/b.py",
        # the interpreter
        *("sitecustomize.py", "usercustomize.py", "pkg/x.pth", "pkg/x.egg-link"),
        *("pkg/a.pyc", "pkg/__pycache__/a.cpython-311.pyc", "x.dist-info/METADATA"),
        *("pkg/x.egg-info/entry_points.txt", "pkg/entry_points.txt", "pyvenv.cfg"),
        # in a folder that may come first among those of Python, and in a project's tests
        *("pkg/plugins/json.py", "pkg/new/os.py", "pkg/new/pytest/a.py"),
        *("mono/test/a.js", "mono/test/new.js", "pkg/vitest.config.mts"),
        # hidden
        *(".env", ".gitattributes", ".pytest.ini", "pkg/.hidden/a.py", ".cargo/config"),
        # the same names as a careless reader sees them
        *(
            "Conftest.PY",
            "\uff43onftest.py",
            "con\u200bftest.py",
            "SETUP.CFG",
            "TESTS/a",
        ),
        *(
            "pkg/TESTS/a.js",
            "\uff4ason.py",
            "pkg/\udcff.py",
            "pkg/a\n.py",
            "pkg/\u202egnp.py",
        ),
    ],
)
def test_what_can_change_how_tests_run_is_refused(name):
    assert chosen(name) == "refused"


def test_a_removed_or_executable_file_is_like_any_other():
    for mode in (GONE, PROGRAM):
        assert chosen("pkg/a.py", mode) == "graded"
        assert chosen("tests/test_a.py", mode) == "refused"


@pytest.mark.parametrize(
    ("pattern", "name", "how"),
    [
        ("src/**", "src/b.py", "graded"),
        ("src/**", "src/deep/new.txt", "graded"),
        ("src/**", "it.py", "refused"),
        ("src/*", "src/new.txt", "graded"),
        ("src/*", "src/deep/new.txt", "refused"),
        ("src/?.js", "src/b.js", "graded"),
        ("**/b.js", "src/b.js", "graded"),
        ("**/b.js", "b.js", "graded"),
        ("pkg/**", "pkg/new/a.py", "graded"),
        ("pkg/**", "pkg/json.py", "graded"),
        # a wildcard stands for no new module outside the packages, and for no name that
        # can change how tests run
        ("src/**", "src/new.py", "refused"),
        ("src/**", "src/org/python/core.py", "refused"),
        ("src/*.py", "src/new.py", "refused"),
        ("*", "new.py", "refused"),
        ("src/**", "src/conftest.py", "refused"),
        ("src/**", "src/x.dist-info/METADATA", "refused"),
        ("tests/*", "tests/test_a.py", "refused"),
        # what is named is meant
        ("src/new.py", "src/new.py", "graded"),
        ("src/new/**", "src/new/deep/a.py", "graded"),
        ("src/new/**", "src/new/conftest.py", "refused"),
        ("src/new/**", "src/new/json.py", "refused"),
        ("conftest.py", "conftest.py", "graded"),
        ("tests/data/**", "tests/data/a.txt", "graded"),
        ("tests/data/**", "tests/data/test_a.py", "refused"),
        (".github/**", ".github/a/b", "graded"),
        # a list of what is named for everything
        ("**", "new/a.txt", "graded"),
        ("**", "conftest.py", "risky"),
        ("**", "new/a.py", "risky"),
        ("**", "org/python/core.py", "risky"),
        ("**", "a.dist-info/METADATA", "risky"),
    ],
)
def test_a_task_says_what_an_agent_may_change(pattern, name, how):
    assert chosen(name, editable=[pattern]) == how


def test_an_empty_list_lets_nothing_through():
    assert chosen("it.py", editable=[]) == "refused"


@pytest.mark.parametrize(
    ("target", "how"),
    [
        ("b.py", "risky"),
        ("../it.py", "risky"),
        ("../../it.py", "refused"),
        ("/etc/passwd", "refused"),
        ("../.git/config", "refused"),
        ("a/../../../x", "refused"),
        # a may be a link itself
        ("a/../b.py", "refused"),
        (None, "refused"),
    ],
)
def test_links_stay_in_the_workspace(target, how):
    assert chosen("src/link", LINK, target, ["**"]) == how
    assert chosen("pkg/link", LINK, target) == "refused"
    assert chosen("src/link", LINK, target, ["src/**"]) == "refused"
    named = "graded" if how == "risky" else "refused"
    assert chosen("src/link", LINK, target, ["src/link"]) == named


def test_a_nested_repository_is_no_file():
    assert chosen("pkg/sub", REPOSITORY, editable=["**"]) == "refused"


def test_a_path_of_any_depth_is_read():
    name = "src/" + "d/" * 5000 + "a.txt"
    assert chosen(name, editable=["src/**/a.txt"]) == "graded"
    assert chosen(name) == "refused"
    assert chosen(name.replace("d/", "tests/", 1)) == "refused"
