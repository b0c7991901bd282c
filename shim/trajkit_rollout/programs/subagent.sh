#!/bin/sh
# subagent TASK: a second agent, with another system prompt, on the same session
{command} "$1" > "$TMPDIR/log" 2>&1
code=$?
tail -n 20 "$TMPDIR/log"
exit $code
