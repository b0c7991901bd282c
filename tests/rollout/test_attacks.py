"""Agents that cheat, and the sandboxes that stop them (docs/sandboxes.md has a table).

A script that gets what it wants prints ``won``. Without isolation it does, which shows
that the script really tries.
"""

import os
import platform
import re
import shlex
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rollout.test_sandbox import ISOLATED, marked, sandbox, sh
from trajkit_rollout import sandbox as local
from trajkit_rollout.sandbox import LimitError, SandboxError
from trajkit_rollout.tasks import Limits

# "local" needs bubblewrap; the others need their program and an image with Python
KINDS = ("local", "docker", "apptainer", "e2b")
IMAGE = "TRAJKIT_TEST_IMAGE_"
_, CGROUP, IDS = local._abilities()


@dataclass(frozen=True, kw_only=True)
class Attack:
    """One thing that a script tries.

    ``stops``: the sandboxes that stop it. ``harmless``: it may be tried on this machine
    without isolation.
    """

    script: str
    stops: tuple[str, ...] = KINDS
    harmless: bool = True


# {host} is a directory of this machine with a file `secret`, {pid} a process with the
# variable KEY=s3cret, {port} a server
ATTACKS = {
    "read the grader": Attack(script="grep -q right {host}/tests/test_it.py"),
    "change the grader": Attack(script="echo pass > {host}/tests/test_it.py"),
    "read the task's solution": Attack(script="cat {host}/solution/it.py"),
    "read the turn log": Attack(script="cat {host}/turns/turns-00000.arrows"),
    "change the turn log": Attack(script="echo 1 >> {host}/turns/turns-00000.arrows"),
    "replace the rewards": Attack(script="rm {host}/rollouts.log"),
    "write to the copy of another sandbox": Attack(
        script="cd $(dirname $(sed -n 's/^[^ ]* [^ ]* [^ ]* \\([^ ]*box[^ ]*\\) .*/\\1/p' "
        "/proc/self/mountinfo | head -1) 2> /dev/null) 2> /dev/null; "
        "echo yes > {host}/other/copy/it.py"
    ),
    "patch the test runner": Attack(
        script="echo 'import os; os._exit(0)' > {prefix}/trajkit_attack.pth",
        harmless=False,
    ),
    "read the environment of others": Attack(
        script="cat /proc/*/environ | grep s3cret"
    ),
    "read the arguments of others": Attack(
        script="cat /proc/*/cmdline | tr '\\0' ' ' | grep t0k[e]n"
    ),
    "kill another process": Attack(script="kill -9 {pid}"),
    "reach a server of this machine": Attack(
        script="{python} -c 'import socket; "
        'socket.create_connection(("127.0.0.1", {port}), 5)\'',
        stops=("local", "e2b"),
    ),
    "link to a file outside": Attack(script="ln -s {host}/secret link && cat link"),
    "hard link to a file outside": Attack(script="ln {host}/secret hard && cat hard"),
    "change the clock": Attack(script="date -s 2001-01-01", harmless=False),
    "mount over a directory": Attack(script="mount -t tmpfs none /usr", harmless=False),
    "make a namespace to become root in": Attack(
        script="unshare --user --map-root-user --mount mount -t tmpfs none /usr",
        stops=("local",),
    ),
    "change the machine's settings": Attack(
        script="echo 1 > /proc/sys/kernel/sysrq", harmless=False
    ),
}


def test_places_of_a_sandbox_are_apart(tmp_path):
    with box_of("local", tmp_path, places=("/app", "/tests")) as box:
        # Python's own folder may be below /tmp
        before = sh(box, "ls /tmp").stdout
        for link in ("/sandbox/tmp", "/sandbox/app", "/sandbox/in", "/app/tests"):
            sh(box, f"rm -rf {link}; ln -s / {link}")
        assert (sh(box, "ls /tmp").stdout, sh(box, "ls /tests").stdout) == (before, b"")
        assert b"tests" in sh(box, "ls /app").stdout
    for places in (("/app", "/app/tests"), ("/app/../x",), ("//tmp/x",), ("/",)):
        with (
            pytest.raises(SandboxError, match=re.escape(repr(places[-1]))),
            box_of("local", tmp_path, places=places),
        ):
            pass


def test_nothing_runs_in_a_sandbox_that_has_ended(tmp_path):
    with box_of("local", tmp_path) as box:
        box._holder, holder = None, box._holder
        with pytest.raises(SandboxError, match="does not run"):
            sh(box, f"touch {tmp_path}/left")
        box._holder = holder
    assert not (tmp_path / "left").exists()


@contextmanager
def target(tmp_path):
    """What this machine has, by the names in `ATTACKS`."""
    host = tmp_path / "host"
    for name, text in {
        "tests/test_it.py": "right",
        "solution/it.py": "yes",
        "turns/turns-00000.arrows": "turn",
        "rollouts.log": "{}",
        "other/copy/it.py": "no",
        "secret": "s3cret",
    }.items():
        (host / name).parent.mkdir(parents=True, exist_ok=True)
        (host / name).write_text(text)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            ["sh", "-c", "read wait # t0ken"],
            stdin=subprocess.PIPE,
            env={"KEY": "s3cret"},
        ) as process,
    ):
        try:
            yield {
                "host": host,
                "pid": process.pid,
                "port": server.getsockname()[1],
                "prefix": sys.prefix,
                "python": sys.executable,
            }
        finally:
            process.kill()


@contextmanager
def box_of(kind, tmp_path, **fields):
    """A sandbox of a kind, or a skip with the reason why there is none."""
    if kind == "local":
        kind = "local apart"
    else:
        fields["image"] = os.environ.get(IMAGE + kind.upper())
        if fields["image"] is None:
            pytest.skip(f"needs {kind} and an image: set {IMAGE}{kind.upper()}")
    with sandbox(kind, tmp_path, **fields) as box:
        yield box


def wins(box, script, found):
    for name, value in found.items():
        script = script.replace(f"{{{name}}}", str(value))
    return sh(box, f"{{ {script}; }} && echo && echo won").stdout.endswith(b"\nwon\n")


@pytest.fixture(scope="module", params=KINDS)
def tried(request, tmp_path_factory):
    """A kind of sandbox, one of it, and what is to be attacked."""
    place = tmp_path_factory.mktemp("attacks")
    with target(place) as found, box_of(request.param, place) as box:
        yield request.param, box, found


@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_is_stopped(tried, name):
    kind, box, found = tried
    attack = ATTACKS[name]
    if kind not in attack.stops:
        pytest.skip(f"{kind} does not stop it")
    assert not wins(box, attack.script, found)
    assert (found["host"] / "secret").read_text() == "s3cret"


@pytest.mark.parametrize("name", [n for n, a in ATTACKS.items() if a.harmless])
def test_an_attack_succeeds_without_isolation(tmp_path, name):
    with target(tmp_path) as found, sandbox("local", tmp_path) as box:
        assert wins(box, ATTACKS[name].script, found)


@pytest.mark.parametrize("kind", KINDS)
def test_a_daemon_ends_with_the_command_that_left_it(tmp_path, kind):
    """Also one that cleared its environment, by which it could be found."""
    with box_of(kind, tmp_path) as box:
        script = "setsid env -i sh -c 'while :; do echo x >> $0; done' {} & sleep 1"
        alive = box.map_path("/work") + "/alive"
        sh(box, script.replace("{}", alive))
        before = box.get(alive)
        assert before
        assert box.get(alive) == before
    assert marked(box.spec.name) == set()


# changes the namespace's first process: it does not die with its parent, and has no mark
HIJACK = """\
import ctypes, os, sys
ptrace = ctypes.CDLL(None).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
was = (ctypes.c_ulong * 27)()
if ptrace(16, 1, None, None):  # PTRACE_ATTACH
    sys.exit("denied")
os.waitpid(1, 1 << 30)
ptrace(12, 1, None, ctypes.byref(was))  # PTRACE_GETREGS
now = type(was)(*was)
# rax, rdi, rsi, orig_rax, rip: prctl(PR_SET_PDEATHSIG, 0)
now[10], now[14], now[13], now[15], now[16] = 157, 1, 0, 2**64 - 1, was[16] - 2
ptrace(13, 1, None, ctypes.byref(now))  # PTRACE_SETREGS
ptrace(9, 1, None, None)  # PTRACE_SINGLESTEP
os.waitpid(1, 1 << 30)
fields = open("/proc/1/stat").read().rpartition(")")[2].split()
begin, end = int(fields[47]), int(fields[48])
os.pwrite(os.open("/proc/1/mem", os.O_RDWR), bytes(end - begin), begin)
was[10], was[15], was[16] = was[15], 2**64 - 1, was[16] - 2
ptrace(13, 1, None, ctypes.byref(was))
ptrace(17, 1, None, None)  # PTRACE_DETACH
print("done")
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs x86_64")
def test_a_process_that_would_outlive_its_command_ends_with_it(tmp_path):
    daemon = "(setsid env -i sh -c 'echo on > pipe; sleep 600' &); cat pipe"
    with sandbox("local apart", tmp_path) as box:
        hijack = [sys.executable, "-c", HIJACK]
        script = f"{shlex.join(hijack)} && mkfifo pipe && {daemon}"
        done = box.exec(["sh", "-c", script], timeout_s=60)
        if done.stderr == b"denied\n":
            pytest.skip("this system lets no process trace the first one")
        assert done.stdout == b"done\non\n", done.stderr
        # the holder, and the namespace's first process
        assert len(inhabitants(box)) == 2
    assert inhabitants(box) == set()


def inhabitants(box):
    """The processes that have a sandbox's directory among their mounts."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"/{box.spec.name}" in (process / "mountinfo").read_text():
                found.add(process.name)
    return found


ZEROS = "head -c 15000000 /dev/zero"
FILES = "i=0; while head -c 100000 /dev/zero > $i; do i=$((i+1)); done; false"
DEEP = "n=$(head -c 240 /dev/zero | tr '\\0' a); for i in $(seq 20)"
# what fails at disk_mb, file_mb, or the size of a file system
CANNOT_FILL = {
    "many files": FILES,
    "files below long names": f"{DEEP}; do mkdir $n; cd $n; done; {FILES}",
    "files without a name": f"exec 3> big; rm big; exec 4> big; rm big; {ZEROS} >&3 && "
    f"{ZEROS} >&4",
    "its input": "cat /dev/zero >&0",
    "a file without a name": "exec 3> big; rm big; cat /dev/zero >&3",
    "one file": "head -c 100000000 /dev/zero > big",
    "a memory file": f"{sys.executable} -c 'import os; "
    "os.truncate(os.memfd_create(str()), 18 << 20)'",
    "shared memory": "cat /dev/zero > /dev/shm/big",
    "files among devices": "echo > /dev/big",
}


@pytest.mark.parametrize("what", CANNOT_FILL)
def test_a_disk_cannot_be_filled_by(tmp_path, what):
    """The kernel refuses what is too much; the sandbox works on."""
    limits = Limits(disk_mb=20, file_mb=16)
    with sandbox("local apart", tmp_path, limits=limits) as box:
        assert sh(box, CANNOT_FILL[what]).code != 0
        (used,) = sh(box, "du -sm . | cut -f1").stdout.split()
        assert int(used) <= 20
        assert sh(box, "rm -rf *; echo on").stdout == b"on\n"


def test_many_files_with_long_names_end_with_the_sandbox(tmp_path):
    with sandbox("local apart", tmp_path) as box:
        script = f"{DEEP}; do mkdir $n; cd $n; done; seq 60000 | xargs touch"
        assert sh(box, script).code == 0
    assert not list((tmp_path / "scratch").iterdir())


# what is no file counts as memory
MEMORY = {
    "memory files": "[os.write(os.memfd_create(str(k)), bytes(9 << 20)) "
    "for k in range(20)]",
    "shared memory": "mmap.mmap(-1, 180 << 20).write(bytes(180 << 20))",
}


@pytest.mark.skipif(not CGROUP, reason="needs systemd, cgroup v2")
@pytest.mark.parametrize("what", MEMORY)
def test_memory_is_limited_in_sum(tmp_path, what):
    with sandbox("local apart", tmp_path, limits=Limits(memory_mb=100)) as box:
        assert not box.loose
        script = f"import mmap, os\nkept = {MEMORY[what]}"
        assert sh(box, f"{sys.executable} -c '{script}'").code != 0


@pytest.mark.skipif(CGROUP != "", reason="has cgroup v2")
def test_limits_that_the_kernel_does_not_hold_are_named(tmp_path):
    if ISOLATED:
        assert "memory_mb is per process" in str(sandbox("local apart", tmp_path).loose)
    assert "processes is not enforced" in str(sandbox("local", tmp_path).loose)


@pytest.mark.parametrize("kind", ["local", "local apart"])
def test_a_log_cannot_be_emptied_by_what_writes_it(tmp_path, kind):
    log = tmp_path / "log"
    empty = "import os; os.ftruncate(1, 0)"
    with sandbox(kind, tmp_path) as box:
        script = (
            f"echo one; : > /proc/self/fd/1; {sys.executable} -c '{empty}'; echo two"
        )
        done = box.exec(["sh", "-c", script], timeout_s=60, log=log)
    assert log.read_bytes() == done.stdout
    assert done.stdout.startswith(b"one\n")
    assert done.stdout.endswith(b"\ntwo\n")


def test_a_log_ends_at_the_disk_limit(tmp_path):
    log = tmp_path / "log"
    with sandbox("local", tmp_path, limits=Limits(disk_mb=2)) as box:
        with pytest.raises(
            LimitError, match=r"output is longer than 2097152|disk_mb = 2"
        ):
            box.exec(["cat", "/dev/zero"], timeout_s=60, log=log)
    assert log.stat().st_size == 2 << 20


def test_a_daemon_that_keeps_the_log_open_does_not_delay_the_end(tmp_path):
    log = tmp_path / "log"
    with sandbox("local", tmp_path) as box:
        script = "(setsid env -i sleep 30 & echo $!)"
        done = box.exec(["sh", "-c", script], timeout_s=60, log=log)
        daemon = int(done.stdout)
        os.kill(daemon, signal.SIGKILL)
    assert done.code == 0


def test_what_an_agent_must_not_see_is_not_shown(tmp_path):
    """Neither it, nor a folder around it, nor one inside; links are followed."""
    for name in ("project/bin", "project/tasks/tests/bin", "other"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "link").symlink_to("project")
    task = tmp_path / "project/tasks"
    for name, seen in {
        "project": True,
        "link": True,
        "project/tasks": True,
        "project/tasks/tests/bin": True,
        "project/bin": False,
        "other": False,
    }.items():
        with sandbox("local apart", tmp_path, path=(str(tmp_path / name),)) as box:
            if seen:
                with pytest.raises(SandboxError, match=f"{name} is visible|contains"):
                    box.hide([task])
            else:
                box.hide([task])
                assert sh(box, f"ls {task}").code != 0
    for place in ("/usr/local/tasks", "/opt/tasks", f"{sys.prefix}/tasks", "/usr"):
        with sandbox("local apart", tmp_path) as box:
            with pytest.raises(SandboxError, match="is visible in the sandbox"):
                box.hide([Path(place)])


def test_output_that_is_longer_than_the_limit_ends_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr("trajkit_rollout.sandbox._MAX_OUTPUT_MB", 1)
    with sandbox("local", tmp_path) as box:
        for stream in (1, 2):
            script = f"head -c 2000000 /dev/zero >&{stream}; sleep 60"
            with pytest.raises(SandboxError, match="output is longer than 1048576"):
                sh(box, script)


@pytest.mark.parametrize("name", ["d", "d" * 240])
def test_a_deep_directory_is_removed(tmp_path, name):
    with sandbox("local", tmp_path) as box:
        deep = f"for i in $(seq 1200); do mkdir {name}; cd -P ./{name} || exit; done"
        # the last ones may not be created: their path is too long for this shell
        sh(box, f"({deep}); chmod 0 {name}")
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.skipif(
    not (CGROUP or IDS),
    reason="this kernel does not limit the processes of a namespace",
)
def test_forking_without_end_is_refused(tmp_path):
    limits = Limits(processes=50)
    with sandbox("local apart", tmp_path, limits=limits) as box:
        done = sh(box, "while :; do env -i sleep 600 & done")
        assert (done.code, done.last_line) == (2, "sh: 0: Cannot fork")
        assert marked(box.spec.name) == set()
        assert sh(box, "echo on").stdout == b"on\n"


def test_an_isolated_sandbox_reaches_the_gateway_and_nothing_else(tmp_path):
    with (
        socket.create_server(("127.0.0.1", 0)) as gateway,
        socket.create_server(("127.0.0.1", 0)) as other,
        sandbox("local apart", tmp_path) as box,
    ):
        url = box.map_url(f"http://127.0.0.1:{gateway.getsockname()[1]}/")
        port = int(url.rpartition(":")[2])
        ask = (
            "import socket\n"
            f"with socket.create_connection(('127.0.0.1', {port})) as line:\n"
            "    line.sendall(b'hi')\n"
            "try:\n"
            f"    socket.create_connection(('127.0.0.1', {other.getsockname()[1]}), 5)\n"
            "except OSError as error:\n"
            "    print(type(error).__name__)\n"
        )
        done = box.exec([sys.executable, "-c", ask], timeout_s=60)
        assert done.stdout == b"ConnectionRefusedError\n", done
        with gateway.accept()[0] as line:
            assert line.recv(10) == b"hi"


def test_a_sandbox_says_what_it_exposes(tmp_path):
    exposed = sandbox("local", tmp_path).exposes
    assert exposed.startswith("the local sandbox isolates nothing (namespaces = 'no')")
    if ISOLATED:
        assert sandbox("local apart", tmp_path).exposes is None
        shared = sandbox("local", tmp_path, options={"network": "host"})
        assert "shares this machine's network" in shared.exposes


def test_without_bubblewrap_the_reason_is_given(tmp_path, monkeypatch):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: no permission' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(local, "_abilities", local._abilities.__wrapped__)
    for path, reason in (
        (f"{tmp_path}:{os.environ['PATH']}", "bwrap: no permission"),
        ("/nowhere", "not installed: bwrap (package bubblewrap) prlimit (package"),
    ):
        monkeypatch.setenv("PATH", path)
        options = {"namespaces": "auto"}
        assert reason in sandbox("local", tmp_path, options=options).exposes
