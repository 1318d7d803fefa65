"""Stand-in of Apptainer's command line, for machines without it: bubblewrap does the work.

It takes the options of `apptainer exec` in Apptainer's documentation, refuses all others, and
isolates as little as the real program does where an option is missing.
"""

from pathlib import Path

from areal_hpc.sandbox.bwrap import (
    find_bubblewrap,
    make_bwrap_public,
)

SCRIPT = r"""#!/bin/bash
set -eu
fail() { echo "FATAL:   $*" >&2; exit 255; }
[ "$1" != --quiet ] || shift
[ "$1" = exec ] || fail "unknown command $1"
shift
given=" " binds=() root=--ro-bind folder=$PWD
while [ $# -gt 0 ]; do
  case $1 in
    --userns | --containall | --cleanenv | --no-init | --no-home | --no-privs) given+="$1 " ;;
    --no-umask | --no-eval) ;;
    --no-mount=*)
      for one in ${1//[=,]/ }; do
        case $one in
          --no-mount | proc | sys | dev | devpts | home | tmp | hostfs | cwd | bind-paths) ;;
          *) fail "unknown mount $one" ;;
        esac
      done ;;
    --writable) root=--bind ;;
    --pwd=*) folder=${1#*=} ;;
    --bind=*)
      IFS=: read -r source place how <<< "${1#*=}"
      [ -e "$source" ] || fail "mount source $source doesn't exist"
      case $how in
        ro) binds+=(--ro-bind "$source" "$place") ;;
        "") binds+=(--bind "$source" "$place") ;;
        *) fail "$how is not a valid bind option" ;;
      esac ;;
    -*) fail "unknown flag: $1" ;;
    *) break ;;
  esac
  shift
done
image=$1
shift
[ -d "$image/bin" ] || [ -L "$image/bin" ] || fail "could not open image $image"
words=(--unshare-user --uid "$(id -u)" --gid "$(id -g)" --die-with-parent)
words+=("$root" "$image" / --proc /proc --dev /dev)
case $given in
  *" --containall "*) words+=(--unshare-pid --unshare-ipc) ;;
  *) words+=(--bind /tmp /tmp) ;;
esac
case $given in *" --no-init "*) words+=(--as-pid-1) ;; esac
case $given in *" --no-privs "*) words+=(--cap-drop ALL) ;; esac
case $given in *" --cleanenv "*) words+=(--clearenv) ;; esac
exec BWRAP "${words[@]}" "${binds[@]}" --chdir "$folder" -- "$@"
"""


def write_apptainer_stand_in(folder: Path) -> None:
    bwrap = find_bubblewrap()
    assert bwrap is not None
    program = folder / "apptainer"
    program.write_text(SCRIPT.replace("BWRAP", str(make_bwrap_public(bwrap))))
    program.chmod(0o755)
