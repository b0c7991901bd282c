"""The faults of rollouts (`shim/trajkit_rollout`)."""

ROLLOUTS = r"""
shim/trajkit_rollout/grade.py: rollout/test_changes rollout/test_grade rollout/test_rollout:every_end
    a link may lead out of the workspace
        |if mode == _REPOSITORY or (mode == LINK and _leaves(name, target)):|
        -> |if mode == _REPOSITORY:|
    a new module may have a name that Python knows
        |risks += [k for k in range(first, len(parts)) if stems[k] in known]|
        -> |risks += []|
    a wildcard names a risky file
        |names[: k + 1] == parts[: k + 1] and pattern.fullmatch(name)|
        -> |pattern.fullmatch(name)|
    a folder is told by its case
        |_FOLDERS.match(_plain(folder)) is not None| -> |_FOLDERS.match(folder) is not None|
    a folder of tests may be in a folder src
        |if k == 0 or parts[k - 1] == "src" or above in projects:|
        -> |if k == 0 or above in projects:|
    a project may be in a folder
        |if k == 0 or parts[k - 1] == "src" or above in projects:|
        -> |if k == 0 or parts[k - 1] == "src":|
    a folder in a package is one
        |inside = covered and f"{name.rpartition('/')[0]}/__init__.py" in after|
        -> |inside = covered|
    a link may lead out of the workspace by another one
        |inner = {"", "..", ".git"}.intersection(parts[n_up:])|
        -> |inner = {"", ".git"}.intersection(parts[n_up:])|
    one passed result of several is enough
        |passed -= others| -> |passed -= set()|
    a reward may be infinite
        |if isinstance(value, bool) or not math.isfinite(value):|
        -> |if isinstance(value, bool):|
    what is refused is applied too
        |graded = [name for name in after if verdicts[name] != "refused"]|
        -> |graded = [*after]|
    a test that is skipped after the changes is believed
        |if own := doubts - _BASES.get(key, set()):| -> |if own := set[str]():|
    a base commit that cannot be graded is no answer
        |why = f"; nothing is known of the base commit: {error}"| -> |raise|
    what no agent can cause is the agent's fault
        |raise TaskError("grade", f"{name} = {text!r}, which is not set here")|
        -> |raise StageError("grade", f"{name} = {text!r}, which is not set here")|
    a program that tells no results is believed
        |if reward > 0 and named and not proofs:| -> |if False:|
    tests may be written before they run
        |for line in before ^ after]| -> |for line in set[str]()]|
    a variable that is not set is empty
        |value = os.environ.get(found[1], found[3]) if found else text|
        -> |value = os.environ.get(found[1], found[3] or "") if found else text|
    a verifier is believed whose tests failed
        |if reward >= 1 and any(proof.code for proof in proofs):| -> |if False:|
shim/trajkit_rollout/sandbox.py: rollout/test_sandbox rollout/test_attacks
    what contains a visible folder may be hidden
        |if hidden.is_relative_to(each) or each.is_relative_to(hidden):|
        -> |if hidden.is_relative_to(each):|
    a place may be in another one
        |if not _PLACE.fullmatch(place) or len(outer) > 1:|
        -> |if not _PLACE.fullmatch(place):|
    a program may be found in the workspace
        |for each in text.split(":") if each.startswith("/")]| -> |for each in text.split(":")]|
    output is not limited
        |if len(data) > room:| -> |if False:|
    a limit that cannot be enforced is dropped
        |if self.loose and not spec.task.places:| -> |if False:|
    a file of the sandbox may be a link
        |test -f {where} && ! test -L {where} && | -> |test -f {where} && |
"""
