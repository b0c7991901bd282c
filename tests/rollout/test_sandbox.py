"""Every kind of sandbox keeps the same promises.

Doubles of Docker's and Apptainer's command lines and of E2B's package make real namespaces
(`tests.rollout.fake_docker`). What an image, a daemon or a network adds is not tried.
"""

import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.rollout import fake_e2b
from trajkit_rollout.sandbox import (
    MARK,
    SANDBOXES,
    SandboxError,
    SandboxSpec,
    _abilities,
    _end,
    _local,
    clear,
)
from trajkit_rollout.settings import HARNESSES, Settings
from trajkit_rollout.tasks import Limits, Task, pack

HERE = Path(__file__).parent
ISOLATED = not _abilities()[0]
# without plugins that a verifier would load, which takes a second
PYTEST = "python -m pytest -p no:anyio -p no:hypothesispytest"
# what the doubles need
NAMESPACES = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork")
APART = subprocess.run((*NAMESPACES, "true"), check=False).returncode == 0
doubled = pytest.mark.skipif(not APART, reason="its double needs namespaces")


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A directory on PATH with the doubles of container programs."""
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    for name, first in (("docker", ""), ("apptainer", "as-apptainer")):
        program = bin_ / name
        script = f'exec {sys.executable} {HERE}/fake_docker.py {first} "$@"'
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    monkeypatch.setitem(sys.modules, "e2b", fake_e2b)
    state = tmp_path / "containers"
    state.mkdir()
    monkeypatch.setenv("FAKE_DOCKER", str(state))
    monkeypatch.setenv("FAKE_DOCKER_PATH", "/usr/bin:/bin")
    monkeypatch.setenv("PATH", str(bin_), prepend=os.pathsep)
    return state


def sandbox(kind, tmp_path, **fields):
    options = {}
    if kind == "local apart" and not ISOLATED:
        pytest.skip("bubblewrap does not work here")
    if kind in ("local apart", "local"):
        options = {"namespaces": "auto" if kind == "local apart" else "no"}
    elif "image" not in fields:
        fields["image"] = "any"
    if kind == "e2b":
        fields.setdefault("gateway", "http://far:1")
    # other processes that test have sandboxes too, which are killed by their names
    name = fields.pop("name", "box")
    own = {
        key: fields.pop(key) for key in ("image", "limits", "places") if key in fields
    }
    return SANDBOXES[kind.split()[0]](
        SandboxSpec(
            name=f"{name}-{os.getpid()}",
            scratch=tmp_path / "scratch",
            task=Task(**own),
            options=fields.pop("options", options),
            **fields,
        )
    )


KINDS = [
    *("local apart", "local"),
    *(pytest.param(name, marks=doubled) for name in ("docker", "apptainer", "e2b")),
]


@pytest.fixture(params=KINDS)
def box(request, tmp_path, fake):
    with sandbox(request.param, tmp_path) as made:
        yield made


def sh(box, script, **options):
    options.setdefault("timeout_s", 60)
    return box.exec(["sh", "-c", script], **options)


def marked(name):
    """The processes of a sandbox, seen from outside."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            if any(e.startswith(f"{MARK}={name}/".encode()) for e in environment):
                found.add(int(process.name))
        except OSError:
            continue
    return found


def test_a_command_has_its_input_directory_and_variables(box):
    done = sh(
        box,
        'cat; pwd; echo "$GREETING" >&2; exit 7',
        cwd=box.map_path("/tmp"),
        env={"GREETING": "a b"},
        stdin=b"in\n",
    )
    assert (done.code, done.stderr) == (7, b"a b\n")
    assert done.stdout.decode() == f"in\n{box.map_path('/tmp')}\n"


def test_home_and_temporary_directory_are_the_sandbox_s_own(box, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "hunter2")
    done = sh(box, 'touch "$HOME/a" "$TMPDIR/b" && env')
    said = dict(line.split("=", 1) for line in done.stdout.decode().splitlines())
    assert done.code == 0
    assert said["HOME"] == box.map_path("/home")
    assert "SECRET_KEY" not in said
    assert said[MARK].startswith(f"{box.spec.name}/")


def test_a_program_that_is_not_there_is_code_127(box):
    assert sh(box, "no-such-program").code == 127


def test_files_go_in_and_come_out_byte_by_byte(box):
    content = bytes(range(256))
    folder = box.map_path("/work") + "/a b/c"
    box.put(pack({"x/y.bin": content, "run": b"#!/bin/sh\necho ran\n"}), folder)
    assert box.get(f"{folder}/x/y.bin") == content
    assert box.exec([f"{folder}/run"], timeout_s=60).stdout == b"ran\n"
    assert box.get(f"{folder}/nothing") is None
    # it may lead to what its reader does not expect
    sh(box, "ln -s y.bin link", cwd=f"{folder}/x")
    assert box.get(f"{folder}/x/link") is None


def test_a_log_gets_both_streams_and_the_result_its_tail(box, tmp_path):
    log = tmp_path / "log"
    done = sh(box, "echo out; echo err >&2; seq 100000; echo last", log=log)
    text = log.read_bytes()
    assert text.startswith(b"out\nerr\n1\n")
    assert done.stdout == text[-(1 << 16) :]
    assert done.last_line == "last"


def test_nothing_that_a_command_began_outlives_its_time(box):
    """Also what left its process group; and the sandbox can go on."""
    script = "setsid sleep 600 & sleep 600 & echo here; sleep 600"
    assert sh(box, script, timeout_s=1).code is None
    assert sleepers(box) == []
    assert sh(box, "echo on").stdout == b"on\n"


@pytest.mark.parametrize("kind", KINDS[:2])
def test_nothing_outlives_a_command_of_a_local_sandbox(tmp_path, kind):
    with sandbox(kind, tmp_path) as box:
        assert sh(box, "setsid sleep 600 & sleep 600 & true").code == 0
        assert sleepers(box) == []


def sleepers(box):
    """The sleeping processes of a sandbox; a container's keeper has not its mark."""
    found = []
    for pid in marked(box.spec.name):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if command.startswith(b"sleep\0"):
            found.append(command)
    return found


def test_what_is_stopped_is_gone(box, tmp_path, fake):
    sh(box, "mkdir ro && touch ro/x && chmod 500 ro", cwd=box.map_path("/work"))
    for _ in range(2):
        box.stop()
        assert marked(box.spec.name) == set()
        assert not list((tmp_path / "scratch").glob("*/*"))
        assert not list(fake.iterdir())


def goes_on(process):
    """Whether a process runs, after a moment that is left to others."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(0.01)
    return process.returncode is None


def is_asleep(process):
    with suppress(OSError):
        return b"sleep\0" + b"601" in (process / "cmdline").read_bytes()
    return False


def test_stopping_ends_the_command_of_another_thread(box):
    results = []

    def work():
        try:
            done = sh(box, "sleep 601", timeout_s=600)
            results.append(done.code)
        except SandboxError:
            results.append("the sandbox was stopped")

    thread = threading.Thread(target=work)
    thread.start()
    # a sandbox runs one command at a time: none can look for it
    while not any(map(is_asleep, Path("/proc").glob("[0-9]*"))):
        assert thread.is_alive()
    box.spec.stopping.set()
    thread.join(60)
    assert results == ["the sandbox was stopped"]
    box.stop()
    assert marked(box.spec.name) == set()


def test_directories_of_the_caller_come_first_on_the_path(tmp_path, fake):
    extra = tmp_path / "extra"
    extra.mkdir()
    (extra / "hello").write_text("#!/bin/sh\necho hello\n")
    (extra / "hello").chmod(0o755)
    with sandbox("local", tmp_path, path=(str(extra),)) as box:
        assert box.exec(["hello"], timeout_s=60).stdout == b"hello\n"
    if APART:
        with sandbox("docker", tmp_path, path=("/tmp/own",)) as box:
            box.put(pack({"hello": b"#!/bin/sh\necho hello\n"}), "/tmp/own")
            assert box.exec(["hello"], timeout_s=60).stdout == b"hello\n"


def test_local_sandboxes_look_alike_from_within(tmp_path):
    """So that what a harness says of its directory is the same in each of a group."""
    said = set()
    for name in ("one", "two"):
        with sandbox("local apart", tmp_path, name=name) as box:
            sh(box, "echo x > left")
            said.add(
                (sh(box, "pwd; ls; id -u; ps -A -o comm=").stdout, box.map_path("/"))
            )
    assert len(said) == 1
    ((text, place),) = said
    assert text.decode().split() == [f"{place}work", "left", "0", "bwrap", "sh", "ps"]


def test_a_local_sandbox_holds_its_limits(tmp_path):
    limits = Limits(file_mb=1, memory_mb=200)
    with sandbox("local", tmp_path, limits=limits) as box:
        assert sh(box, "head -c 1000000 /dev/zero > a").code == 0
        assert sh(box, "head -c 2000000 /dev/zero > b").code != 0
        hungry = [sys.executable, "-S", "-c", "bytearray(400 << 20)"]
        done = box.exec(hungry, timeout_s=60)
        assert done.last_line == "MemoryError"


def arguments_of(monkeypatch, tmp_path, **fields):
    """What the docker client is called with, when it starts."""
    program = tmp_path / "pod"
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    program.chmod(0o755)
    options = {"binary": str(program), **fields.pop("options", {})}
    with sandbox("docker", tmp_path, options=options, **fields) as box:
        reached = box.map_url("http://127.0.0.1:1234")
    calls = (tmp_path / "calls").read_text().replace(box.spec.name, "box")
    return calls.splitlines(), reached


def test_docker_is_told_the_limits_and_the_network(tmp_path, monkeypatch):
    # what the shell program reads is not what this machine's user has set
    for name in ("build", "file_mb", "image"):
        monkeypatch.setenv(name, "elsewhere")
    limits = Limits(memory_mb=512, cpus=1.5, processes=64)
    calls, reached = arguments_of(
        monkeypatch, tmp_path, limits=limits, options={"network": "own"}
    )
    assert calls[0] == "rm --force --volumes box"
    assert calls[1] == (
        "run --detach --name box --network own --add-host "
        "host.docker.internal:host-gateway --memory 512m --cpus 1.5 --pids-limit 64 "
        "--init --entrypoint sleep any infinity"
    )
    assert calls[-1] == "rm --force --volumes box"
    assert reached == "http://host.docker.internal:1234"


def test_the_host_s_network_needs_no_other_address(tmp_path, monkeypatch):
    limits = Limits(file_mb=10)
    calls, reached = arguments_of(monkeypatch, tmp_path, limits=limits)
    assert f"--network host --ulimit fsize={10 << 20}" in calls[1]
    assert reached == "http://127.0.0.1:1234"
    reached = arguments_of(monkeypatch, tmp_path, gateway="http://far:1")[1]
    assert reached == "http://far:1"


@doubled
def test_values_of_variables_are_no_arguments_of_docker_s_client(tmp_path, fake):
    with sandbox("docker", tmp_path) as box:
        script = "tr '\\0' ' ' < /proc/$PPID/cmdline; echo $KEY"
        done = sh(box, script, env={"KEY": "hunter2"})
        assert done.stdout.endswith(b"hunter2\n")
        assert done.stdout.count(b"hunter2") == 1


@doubled
def test_a_container_that_died_is_the_sandbox_s_failure(tmp_path, fake):
    with sandbox("docker", tmp_path) as box:
        shutil.move(fake / f"{box.spec.name}.json", tmp_path / "kept.json")
        with pytest.raises(SandboxError, match="No such container"):
            sh(box, "true")
        shutil.move(tmp_path / "kept.json", fake / f"{box.spec.name}.json")


REFUSED = [
    ("apptainer", {"image": None}, "needs an image"),
    ("apptainer", {"image": "absent"}, "absent: cannot be started: .*could not open"),
    ("apptainer", {"options": {"binary": "no-such"}}, "not found"),
    ("apptainer", {"limits": Limits(file_mb=1)}, "cannot enforce it"),
    ("e2b", {"gateway": None}, "give the URL by which"),
    ("e2b", {"image": "absent"}, "template 'absent' not found"),
    ("e2b", {"limits": Limits(cpus=1.0)}, "cannot enforce it"),
    ("e2b", {"options": {"lifetime": "long"}}, "e2b: invalid literal"),
    ("docker", {"image": None}, "needs an image"),
    ("docker", {"image": "absent"}, "Unable to find image"),
    ("docker", {"options": {"binary": "no-such-docker"}}, "not found"),
    ("docker", {"options": {"color": "red"}}, "'color'; options: binary, network"),
    ("local", {"image": "any"}, "has no image"),
    ("local", {"limits": Limits(cpus=1.0)}, "cpus = 1.0: a sandbox of kind local"),
    ("local", {"options": {"namespaces": "perhaps"}}, "is not one of auto, no"),
    ("local", {"options": {"network": "none"}}, "is not one of gateway, host"),
]


@pytest.mark.parametrize(("kind", "fields", "said"), REFUSED)
def test_what_cannot_be_made_is_refused(tmp_path, fake, kind, fields, said):
    with pytest.raises(SandboxError, match=said), sandbox(kind, tmp_path, **fields):
        pass
    assert not list(fake.iterdir())


MADE = SANDBOXES["local"](SandboxSpec(name="made", scratch=Path()))


def test_kinds_are_found_by_name_or_import_path():
    def chosen(**options):
        return Settings(**{"harness": "shell", **options}).resolve()

    by_path = chosen(sandbox="trajkit_rollout.sandbox:LocalSandbox")
    assert by_path == chosen()
    assert chosen(harness="claude_code")[0] is HARNESSES["claude-code"]
    for name, said in (
        ("cloud", "is not one of"),
        ("no_such_package:X", "No module named"),
        ("trajkit_rollout.sandbox:Absent", "no attribute 'Absent'"),
        (f"{__name__}:MADE", "LocalSandbox .*, not a subclass of Sandbox"),
        ("trajkit_rollout.sandbox:SandboxSpec", "SandboxSpec'>, not a subclass"),
    ):
        with pytest.raises(ValueError, match=said):
            chosen(sandbox=name)
    with pytest.raises(ValueError, match="Harness'>, not an instance of Harness"):
        chosen(harness="trajkit_rollout.settings:Harness")


def unpack(archive):
    """The regular files of a tar archive by path."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {
            entry.name.removeprefix("./"): tar.extractfile(entry).read()
            for entry in tar
            if entry.isfile()
        }


@pytest.mark.skipif(not ISOLATED, reason="bubblewrap does not work here")
def test_a_killed_runner_takes_its_sandboxes_processes_along(tmp_path):
    """Where the system knows how: what it started dies with it."""
    left = f"left-{os.getpid()}"
    code = (
        "from pathlib import Path\n"
        "from trajkit_rollout import sandbox as local\n"
        "from trajkit_rollout.sandbox import SandboxSpec\n"
        f"spec = SandboxSpec(name={left!r}, scratch=Path({str(tmp_path)!r}))\n"
        "box = local.LocalSandbox(spec)\n"
        "box.start()\n"
        "box.exec(['sh', '-c', 'setsid sleep 600'], timeout_s=600)\n"
    )
    paths = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}
    ) as runner:
        try:
            while not marked(left):
                assert goes_on(runner)
        finally:
            runner.send_signal(signal.SIGKILL)
    while marked(left):
        pass


def test_what_a_killed_run_left_is_ended_before_its_files_are_removed(tmp_path):
    left = tmp_path / f"trajkit-left-{os.getpid()}"
    left.mkdir()
    script = "while :; do mkdir -p d; echo x > d/$RANDOM; done"
    with subprocess.Popen(
        ["bash", "-c", script], cwd=left, env={**os.environ, MARK: f"{left.name}/1"}
    ) as process:
        try:
            while not (left / "d").exists():
                assert goes_on(process)
            clear(tmp_path)
            assert not tmp_path.exists()
            assert process.wait(60) == -signal.SIGKILL
        finally:
            process.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_a_sandbox_takes_the_place_of_one_that_a_killed_run_left(tmp_path, fake, kind):
    left = sandbox(kind, tmp_path)
    left.start()
    sh(left, "touch seen")
    with sandbox(kind, tmp_path) as box:
        assert sh(box, "test -e seen").code == 1
    with suppress(SandboxError):
        left.stop()


def test_what_kills_processes_ends_with_its_own_time(tmp_path, monkeypatch):
    """On a busy machine it would otherwise kill the next command."""
    monkeypatch.setattr("trajkit_rollout.sandbox._DYING_SECONDS", 0.5)
    go, late = tmp_path / "go", tmp_path / "late"
    os.mkfifo(go)
    _end(("sh", "-c", f"(read word; touch {late}) < {go} & wait"))
    # until nobody reads
    with suppress(OSError):
        while True:
            os.close(os.open(go, os.O_WRONLY | os.O_NONBLOCK))
    assert not late.exists()


@pytest.mark.parametrize("argument", ["a\0b", "x" * (1 << 20)], ids=["null", "long"])
def test_a_command_that_cannot_be_started_is_the_sandbox_s_failure(box, argument):
    with pytest.raises(SandboxError):
        box.exec(["echo", argument], timeout_s=60)


@doubled
def test_a_container_that_cannot_be_removed_is_reported(tmp_path, fake):
    program = tmp_path / "pod"
    broken = tmp_path / "broken"
    program.write_text(f'#!/bin/sh\ntest -e {broken} && exit 3\nexec docker "$@"\n')
    program.chmod(0o755)
    box = sandbox("docker", tmp_path, options={"binary": str(program)})
    box.start()
    broken.touch()
    with pytest.raises(SandboxError, match="cannot be removed: exit code 3"):
        box.stop()
    # written files are
    assert not list((tmp_path / "scratch").iterdir())
    program.unlink()
    with pytest.raises(SandboxError, match="cannot be removed: exit code 127"):
        box.stop()
    broken.unlink()
    shutil.copy(tmp_path / "bin/docker", program)
    box.stop()
    assert not list(fake.iterdir())


@doubled
def test_faults_of_e2b_s_package_are_those_of_the_sandbox(tmp_path, fake, monkeypatch):
    def unreachable(*_, **__):
        raise httpx.ConnectError("no route")

    with sandbox("e2b", tmp_path) as box:
        for kind, name in ((fake_e2b.Files, "read"), (fake_e2b.Commands, "run")):
            with monkeypatch.context() as patch:
                patch.setattr(kind, name, unreachable)
                with pytest.raises(SandboxError, match="e2b: no route"):
                    sh(box, "true")
        with monkeypatch.context() as patch:
            patch.setattr(fake_e2b.Sandbox, "kill", unreachable)
            with pytest.raises(SandboxError, match="e2b: no route"):
                box.stop()
    assert not list(fake.iterdir())


@pytest.mark.parametrize("step", ["check", "run"])
def test_a_program_that_is_missing_is_named(tmp_path, step):
    """Without it a local sandbox isolates nothing, or runs nothing."""
    for name in ("sh", "bwrap", "id", "uname"):
        (tmp_path / name).symlink_to(shutil.which(name) or "/bin/true")
    command = [*_local(step, "", "", "", "", ""), "true"]
    done = subprocess.run(
        command, env={"PATH": str(tmp_path)}, capture_output=True, check=False
    )
    said = (
        "prlimit (package util-linux)"
        if step == "check"
        else "prlimit is not installed"
    )
    assert done.returncode == (1 if step == "check" else 125)
    assert said in done.stderr.decode()
    assert "bwrap" not in done.stderr.decode()


@pytest.mark.skipif(not ISOLATED, reason="bubblewrap does not work here")
@pytest.mark.parametrize("directory", ["", "/run/user/1000"])
def test_a_user_s_systemd_is_asked_only_where_it_can_be_found(tmp_path, directory):
    asked = tmp_path / "asked"
    for name, script in {
        "id": "echo 1000",
        "systemd-run": f"test $XDG_RUNTIME_DIR && echo $* >> {asked}",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env["XDG_RUNTIME_DIR"] = directory
    done = subprocess.run(
        _local("check"), env=env, capture_output=True, check=True, text=True
    )
    cgroup, _ = done.stdout.splitlines()
    if not directory or not Path("/sys/fs/cgroup/cgroup.controllers").exists():
        assert (cgroup, asked.exists()) == ("", False)
    else:
        assert cgroup.startswith(
            "env XDG_RUNTIME_DIR=/run/user/1000 systemd-run --user "
        )
        assert "--property=MemoryMax=64M true" in asked.read_text()
        # what the command itself does not get
        told = _local("run", cgroup, "9", "", "", "", "env")
        env["XDG_RUNTIME_DIR"] = ""
        subprocess.run(told, env=env, capture_output=True, check=True)


def test_no_program_or_library_is_found_by_a_relative_path(tmp_path, monkeypatch):
    """Its folder would be one of the workspace."""
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", f"bin::.:{path}:")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/nowhere:")
    with sandbox("local", tmp_path) as box:
        done = box.exec(["sh", "-c", "echo $PATH $LD_LIBRARY_PATH"], timeout_s=60)
    found, library = done.stdout.decode().split()
    assert found == f"{Path(sys.executable).parent}:{path}"
    assert library == "/nowhere"
