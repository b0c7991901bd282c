# What git does for grading. Arguments: a step, and the tree of the workspace's start. The
# repository of GIT_DIR, outside of the workspace, finds the changes.
step=$1 start=$2
# The user's configuration is ignored; files may belong to another user. The first commit
# has the same hash in every rollout.
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null
export GIT_CONFIG_COUNT=1 GIT_CONFIG_KEY_0=safe.directory GIT_CONFIG_VALUE_0='*'
export GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z

# git ignores files below another repository. So the .git of a nested repository is
# renamed for a moment; that of the workspace itself is not one of its files.
add() {
  find . -path ./.git -prune -o -name .git -prune -exec sh -c \
    'for each; do mv "$each" "${each%.git}.git~trajkit"; done' sh {} +
  git add --all .
  code=$?
  find . -name .git~trajkit -prune -exec sh -c \
    'for each; do mv "$each" "${each%.git~trajkit}.git"; done' sh {} +
  return $code
}

# Unlike diff, diff-tree ignores settings that change a patch's paths: an agent can write
# to the repository's configuration.
compare() {
  git diff-tree -r --no-renames --full-index "$@" "$start" $(git write-tree)
}

case $step in
init)
  # agents expect a repository; the other one finds their changes
  base=$GIT_DIR && (
    unset GIT_DIR GIT_WORK_TREE && test -e .git || {
      git init -qb main && git add -A && git commit -qm Start --allow-empty
    } && git init -q --bare "$base"
  ) || exit
  mkdir -p "$base/info" && echo .git~trajkit > "$base/info/exclude" || exit
  # files are compared as bytes, whatever the workspace's attributes say
  echo '* -text -ident -filter -working-tree-encoding' > "$base/info/attributes"
  add && start=$(git write-tree) && echo $start && git ls-tree -r --name-only -z $start
  ;;
patch) add && compare --patch --binary ;;
# In a patch, one change may have two names. In the tree that it makes, each changed file
# has one.
apply) git apply --whitespace=nowarn --cached && compare --raw -z ;;
contents)
  # a line for each hash of the input
  while read hash; do
    git cat-file blob $hash | base64 | tr -d '\n' && echo || exit
  done
  ;;
take)
  git read-tree --reset "$start" && git update-index -z --index-info &&
    tree=$(git write-tree) && git read-tree --reset "$start" &&
    git read-tree --reset -u $tree
  ;;
modules)
  # what each Python here can import, without importing any; without Python there is none
  for each in python python3; do
    if command -v $each > /dev/null; then
      $each -I -c '
import os, sys
names = {*sys.builtin_module_names, *getattr(sys, "stdlib_module_names", ())}
for path in sys.path:
    if os.path.isdir(path):
        names.update(name.partition(".")[0] for name in os.listdir(path))
print(*names, sep=chr(10))
' || exit
    fi
  done
  ;;
esac
