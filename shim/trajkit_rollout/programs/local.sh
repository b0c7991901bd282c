# Sandboxes of this machine's own processes. Arguments: a step, and what it needs.
step=$1
shift

# What a command gets. It dies with the thread that started it; without --size, files in
# /dev could fill half of the memory.
isolated='bwrap --unshare-all --unshare-user --disable-userns --uid 0 --gid 0
  --cap-drop ALL --hostname sandbox --new-session --die-with-parent --proc /proc --dev /dev
  --size 67108864 --tmpfs /dev/shm --remount-ro /dev'
# what the processes and files of a sandbox are in
apart='unshare --user --map-root-user --mount --pid --fork --kill-child --mount-proc'

# Sets `first` to the first process of the namespace that `hold` made, as seen from here.
first() {
  read first < /proc/$1/task/$1/children
}

case $step in
check)
  # Fails if there is no isolation, and says why. Prints the start of a command that runs
  # another one in a cgroup, and whether the kernel has limits of process ids per namespace
  # (before Linux 6.14 they are the machine's); an empty line for what it has not.
  missing=
  for each in bwrap:bubblewrap prlimit:util-linux nsenter:util-linux unshare:util-linux; do
    command -v ${each%:*} > /dev/null || missing="$missing ${each%:*} (package ${each#*:})"
  done
  test -z "$missing" || {
    echo "not installed:$missing" >&2
    exit 1
  }
  $isolated --ro-bind / / true && $apart true || exit
  # a user's systemd is found by a variable that commands do not get
  cgroup=
  if test "$(id -u)" = 0; then
    cgroup='systemd-run --scope --quiet --collect'
  elif test "$XDG_RUNTIME_DIR"; then
    cgroup="env XDG_RUNTIME_DIR=$XDG_RUNTIME_DIR systemd-run --user --scope --quiet --collect"
  fi
  test "$cgroup" && test -e /sys/fs/cgroup/cgroup.controllers &&
    timeout 5 $cgroup --property=MemoryMax=64M true 2> /dev/null || cgroup=
  echo "$cgroup"
  release=$(uname -r)
  minor=${release#*.}
  test $((${release%%.*} * 1000 + ${minor%%[!0-9]*})) -ge 6014 && echo yes || echo
  ;;
hold)
  # ROOT, OPTIONS of its file system, LAST process id or nothing, FOLDERS to make. The
  # kernel does not give out numbers up to 300 twice. It reaps what ends in the namespace,
  # and ends with its input.
  exec $apart sh -c '
mount -t tmpfs -o "$2" tmpfs "$1" && cd "$1" || exit
if test "$3"; then
  echo 301 > /proc/sys/kernel/ns_last_pid && echo "$3" > /proc/sys/kernel/pid_max || exit
fi
shift 3
mkdir -p -- "$@" && echo ready && exec env --ignore-signal=CHLD cat' sh "$@"
  ;;
run)
  # the start of a command in a CGROUP or nothing, the limits of PROCESSES, MEMORY and FILE
  # (in MiB) or nothing, the HOLDER or nothing, options of bwrap, command
  command -v prlimit > /dev/null || {
    echo 'prlimit is not installed (package util-linux)' >&2
    exit 125
  }
  cgroup=$1 processes=$2 memory=$3 file=$4 holder=$5
  shift 5
  limited="prlimit --core=0 ${file:+--fsize=$((file << 20))}"
  if test "$cgroup"; then
    cgroup="$cgroup --property=TasksMax=$processes"
    test -z "$memory" ||
      cgroup="$cgroup --property=MemoryMax=${memory}M --property=MemorySwapMax=0"
    cgroup="$cgroup env --unset=XDG_RUNTIME_DIR"
  elif test "$memory"; then
    limited="$limited --as=$((memory << 20))"
  fi
  test "$holder" || exec $limited -- "$@"
  first $holder
  exec $cgroup $limited -- \
    nsenter --target $first --user --mount --pid --preserve-credentials -- $isolated "$@"
  ;;
end)
  # ends all processes but that of the HOLDER
  first $1
  cd "/proc/$first/root" || exit
  while set -- proc/[0-9]* && test $# -gt 1; do
    nsenter --target $first --user --mount --pid --preserve-credentials -- \
      sh -c 'kill -9 -1'
  done
  ;;
esac
