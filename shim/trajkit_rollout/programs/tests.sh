# Prints a hash and the name of each file of the tests, whose names are the input, each with
# a null character at its end, and of what Python or pytest could read beside them.
# Arguments: the folder of the reward, the folder of the tests, and those in it that have
# tests. Also what a program can do to keep a verifier from writing its reward.
stat -c '%i-%a  %n' "$1"
find "$1" -maxdepth 1 -name 'reward.*' ! \( -type f -perm -200 \) -exec echo 'not a file  {}' \;
cd "$2" || exit
shift 2
{
  cat
  find "$@" -maxdepth 1 \( -name '*.py' -o -name '*.so' -o -name '*.ini' -o -name '*.toml' \
    -o -name '*.cfg' \) -print0
  for each; do
    find "$each/__pycache__" -maxdepth 1 -name '*.pyc' -print0
  done
} 2> /dev/null | xargs -0 sha256sum 2> /dev/null | sed 's,  \./,  ,' | sort -u
