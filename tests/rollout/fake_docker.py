"""What the tests have in place of Docker: its command line over plain namespaces.

``run``, ``exec`` and ``rm`` with the options that the gateway's sandbox gives them; any
other is an error, as it is to Docker. A container is a root directory of its own, with
this machine's programs bound into it, and one process namespace for all its commands.
An image is a name; ``absent`` is none. ``FAKE_DOCKER`` is the directory of what there is.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HOME = Path(os.environ["FAKE_DOCKER"])
# valued options of each command, and those that are flags
VALUED = {
    "run": {
        *("--name", "--network", "--add-host", "--memory", "--cpus", "--pids-limit"),
        *("--ulimit", "--env", "--entrypoint"),
    },
    "exec": {"--env", "--workdir"},
    "rm": set(),
}
FLAGS = {
    "run": {"--detach", "--init"},
    "exec": {"--interactive"},
    "rm": {"--force", "--volumes"},
}


def fail(message, code=1):
    sys.stderr.write(f"{message}\n")
    sys.exit(code)


def split(command, arguments):
    """Options and the rest."""
    options = {}
    while arguments and arguments[0].startswith("-"):
        name = arguments.pop(0)
        if name in VALUED[command]:
            options.setdefault(name, []).append(arguments.pop(0))
        elif name in FLAGS[command]:
            options[name] = []
        else:
            fail(f"unknown flag: {name}", 125)
    return options, arguments


def run(options, arguments):
    image, *rest = arguments
    if image == "absent":
        # as the client of Docker 28 says it
        hint = "Run 'docker run --help' for more information"
        fail(f"Unable to find image {image!r}\n\n{hint}", 125)
    assert [*options["--entrypoint"], *rest] == ["sleep", "infinity"]
    (name,) = options["--name"]
    root = HOME / name
    for part in ("proc", "dev", "usr", "etc", "opt", "work"):
        (root / part).mkdir(parents=True)
    (root / "tmp").mkdir()
    for part in ("bin", "lib", "lib64", "sbin"):
        (root / part).symlink_to(f"usr/{part}")
    binds = " && ".join(
        f"mount --rbind /{part} {root}/{part}" for part in ("usr", "etc", "opt", "dev")
    )
    script = (
        f"{binds} && mount -t proc proc {root}/proc && exec chroot {root} sleep 600"
    )
    apart = ["unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"]
    keeper = subprocess.Popen(
        [*apart, "--kill-child", "sh", "-c", script],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{keeper.pid}/task/{keeper.pid}/children")
    while True:
        first = children.read_text().split()
        if first and Path(f"/proc/{first[0]}/root").resolve() == root.resolve():
            break
        assert keeper.poll() is None, "the container died"
        time.sleep(0.01)
    known = {"options": options, "keeper": keeper.pid, "first": int(first[0])}
    (HOME / f"{name}.json").write_text(json.dumps(known))
    sys.stdout.write("0123456789ab\n")


def execute(options, arguments):
    name, *command = arguments
    record = HOME / f"{name}.json"
    if not record.exists():
        fail(f"Error response from daemon: No such container: {name}")
    known = json.loads(record.read_text())
    env = {"PATH": os.environ["FAKE_DOCKER_PATH"]}
    for given in [*known["options"].get("--env", []), *options.get("--env", [])]:
        key, equals, value = given.partition("=")
        env[key] = value if equals else os.environ[key]
    (cwd,) = options.get("--workdir", ["/"])
    within = ["nsenter", "--target", str(known["first"]), "--user", "--mount", "--pid"]
    script = 'cd "$1" && shift && exec "$@"'
    os.execvpe(
        within[0],
        [*within, "--root", "--wd", "sh", "-c", script, "sh", cwd, *command],
        env,
    )


def remove(options, arguments):
    assert "--force" in options
    (name,) = arguments
    record = HOME / f"{name}.json"
    if record.exists():
        keeper = json.loads(record.read_text())["keeper"]
        os.killpg(keeper, 9)
        while Path(f"/proc/{keeper}").exists():
            if Path(f"/proc/{keeper}/stat").read_text().split()[2] == "Z":
                break
            time.sleep(0.01)
        record.unlink()
        shutil.rmtree(HOME / name)


def apptainer(arguments):
    """The command line of Apptainer, said in Docker's."""
    words = list(arguments)
    if words[:2] == ["instance", "start"]:
        *options, image, name = words[2:]
        known = {"--containall", "--cleanenv", "--overlay", "--memory", "--cpus"}
        flags = {word for word in options if word.startswith("--")}
        assert flags <= known | {"--pids-limit"}, flags
        if image == "absent":
            fail("FATAL:   While checking image: could not open image absent", 255)
        run(
            {"--name": [name], "--entrypoint": ["sleep"]},
            [image, "infinity"],
        )
    elif words[:3] == ["instance", "stop", "--force"]:
        if not (HOME / f"{words[3]}.json").exists():
            fail(f"FATAL:   no instance found with name {words[3]}", 255)
        remove({"--force": []}, words[3:])
    else:
        assert words.pop(0) == "exec"
        cwd = "/"
        while words[0].startswith("--"):
            option = words.pop(0)
            if option == "--pwd":
                cwd = words.pop(0)
            else:
                assert option == "--cleanenv"
        name = words.pop(0).removeprefix("instance://")
        if not (HOME / f"{name}.json").exists():
            fail(f"FATAL:   no instance found with name {name}", 255)
        mark = "APPTAINERENV_"
        given = [
            f"{key.removeprefix(mark)}={value}"
            for key, value in os.environ.items()
            if key.startswith(mark)
        ]
        execute({"--workdir": [cwd], "--env": given}, [name, *words])


if __name__ == "__main__":
    if sys.argv[1] == "as-apptainer":
        apptainer(sys.argv[2:])
        sys.exit()
    command, *rest = sys.argv[1:]
    actions = {"run": run, "exec": execute, "rm": remove}
    actions[command](*split(command, rest))
