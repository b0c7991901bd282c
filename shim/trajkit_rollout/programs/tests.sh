# Prints lines, each with the name of a file at its end, that differ when a program changed
# the files that a grader reads: those of the tests, whose names are the input, each with a
# null character at its end; what Python or pytest could read beside and above them; and
# trajkit's program; and what pytest reads in the workspace without being told. No program
# can choose the time of a change, also if it undoes it. Arguments: the folders of the
# reward, of trajkit's program and of the tests; the workspace, as a path from the tests;
# and the folders in the tests that have some.
logs=$1 grader=$2 workspace=$4
cd "$3" || exit
shift 4
# what keeps a verifier from writing its reward
stat -c '%i-%a  %n' "$logs"
find "$logs" -maxdepth 1 -name 'reward.*' ! \( -type f -perm -200 \) -exec echo 'odd  {}' \;
readable() {
  depth=$1
  shift
  find "$@" -maxdepth $depth \( -name '*.py' -o -name '*.pyc' -o -name '*.so' \
    -o -name '*.ini' -o -name '*.toml' -o -name '*.cfg' \) -print0
}
{
  cat
  find "$grader" ! -type d ! -name nonce ! -name inner ! -name results -print0
  find "$workspace" \( -name conftest.py -o -name '*pytest.ini' -o -name '*pytest.toml' \
    -o -name tox.ini -o -name setup.cfg -o -name pyproject.toml \
    -o -path '*test*/__pycache__/*' \) -print0
  readable 1 ..
  readable 2 "$@"
} 2> /dev/null | xargs -0 sh -c 'sha256sum "$@"; stat -c "%i %z  %n" "$@"' sh 2> /dev/null |
  sed 's,  \./,  ,' | sort -u
