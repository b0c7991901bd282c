# A sandbox of Docker, or of a client with the same commands (podman). Arguments: a step,
# and a command to execute. ContainerSandbox has the variables.
step=$1
shift
case $step in
start)
  if test "$build"; then
    "$binary" build --quiet --tag "$image" "$build" || exit
  fi
  host=
  test "$network" = host || host='--add-host host.docker.internal:host-gateway'
  said=$("$binary" run --detach --name "$name" --network "$network" $host \
    ${memory_mb:+--memory ${memory_mb}m} ${cpus:+--cpus $cpus} \
    ${processes:+--pids-limit $processes} ${file_mb:+--ulimit fsize=$((file_mb << 20))} \
    --init --entrypoint sleep "$image" infinity 2>&1)
  code=$?
  # its last line may be a hint that does not say what is wrong
  echo "$said" | grep -v "^Run '.* --help'" >&2
  exit $code
  ;;
exec)
  # the client reads the values from its environment: no process list shows them
  set -- "$name" "$@"
  for each in $variables; do
    set -- --env $each "$@"
  done
  exec "$binary" exec --interactive "$@"
  ;;
remove) exec "$binary" rm --force --volumes "$name" ;;
esac
