# Runs a command in a sandbox. Arguments: folders before PATH, HOME, TMPDIR, directory
# (HOME and the directory are made if they are missing), command. Some container clients
# set HOME themselves.
PATH="$1$PATH" HOME="$2" TMPDIR="$3"
export PATH HOME TMPDIR
test -d "$4" || mkdir -p "$4"
test -d "$2" || mkdir -p "$2"
cd "$4" || exit 125
shift 4
exec "$@"
