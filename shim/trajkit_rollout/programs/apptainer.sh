# An instance of Apptainer, or of a client with the same commands (singularity). Arguments:
# a step, and a command to execute. ContainerSandbox has the variables.
step=$1
shift
case $step in
start)
  test -z "$build" || {
    echo "$binary cannot build an image" >&2
    exit 1
  }
  exec "$binary" instance start --containall --cleanenv --overlay "$overlay" \
    ${memory_mb:+--memory ${memory_mb}M} ${cpus:+--cpus $cpus} \
    ${processes:+--pids-limit $processes} "$image" "$name"
  ;;
exec) exec "$binary" exec --cleanenv --pwd / "instance://$name" "$@" ;;
remove) exec "$binary" instance stop --force "$name" ;;
esac
