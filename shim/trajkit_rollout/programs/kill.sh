# Kills the processes with a mark, $0, again and again, until it finds no more.
more=1
while test $more; do
  more=
  for each in $(grep -lsF "$0" /proc/[0-9]*/environ); do
    each=${each#/proc/}
    kill -9 ${each%/environ} 2> /dev/null && more=1
  done
done
true
