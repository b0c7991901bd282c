# What git does for grading. Arguments: a step, and the tree of the workspace's start. The
# repository of GIT_DIR, outside of the workspace, finds the changes.
step=$1 start=$2

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
  base=$GIT_DIR && unset GIT_DIR GIT_WORK_TREE && test -e .git || {
    git init -qb main && git add -A && git commit -qm Start --allow-empty
  } && git init -q --bare "$base"
  ;;
tree) add && git write-tree ;;
patch) add && compare --patch --binary ;;
# In a patch, one change may have two names. In the tree that it makes, each changed file
# has one.
apply) git apply --whitespace=nowarn --cached && compare --raw -z ;;
list) git ls-tree -r --name-only -z "$start" ;;
contents) git cat-file --batch ;;
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
