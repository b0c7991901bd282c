# Holds a sandbox. Arguments: its directory, the options of its file system, and, where the
# kernel limits the process ids of a namespace, their greatest one. It reaps what ends in
# the namespace, and ends with its input.
mount -t tmpfs -o "$2" tmpfs "$1" || exit
if test "$3"; then
  # numbers up to 300 are not given out twice
  echo 301 > /proc/sys/kernel/ns_last_pid && echo "$3" > /proc/sys/kernel/pid_max || exit
fi
echo ready
exec env --ignore-signal=CHLD cat
