# Runs a command in a sandbox. Arguments: folders before PATH, HOME, TMPDIR, directory,
# command. Some container clients set HOME themselves.
PATH="$1$PATH" HOME="$2" TMPDIR="$3"
export PATH HOME TMPDIR
cd "$4" || exit 125
shift 4
exec "$@"
