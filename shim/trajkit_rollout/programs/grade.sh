# Runs the grader of a task, which imports nothing from folders that were not named.
# Arguments: its kind, the command or script, plugins of pytest. Variables: TESTS, WORKSPACE,
# GRADER and LOGS, which are folders.
kind=$1 command=$2
shift 2
export PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1 PYTHONPATH="$GRADER"
export PIP_CONFIG_FILE=/dev/null UV_NO_CONFIG=1 PYTEST_ADDOPTS=
for each; do
  PYTEST_ADDOPTS="$PYTEST_ADDOPTS -p $each"
done
# a verifier chooses its plugins; those of the workspace are not found, since its folder is
# added to the path only after plugins are loaded
rm -rf "$LOGS/reward.txt" "$LOGS/reward.json"
test $kind = reward_file || export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
if test $kind = script; then
  exec python -I "$GRADER/sitecustomize.py" "$TESTS/$command"
fi
exec sh -c "$command"
