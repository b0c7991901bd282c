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
  exec "$binary" run --detach --name "$name" --network "$network" $host \
    ${memory_mb:+--memory ${memory_mb}m} ${cpus:+--cpus $cpus} \
    ${processes:+--pids-limit $processes} ${file_mb:+--ulimit fsize=$((file_mb << 20))} \
    --init --entrypoint sleep "$image" infinity
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
