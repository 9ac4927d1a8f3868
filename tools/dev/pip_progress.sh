#!/usr/bin/env bash
# Of all that pip says with `--progress-bar raw`: each 100 MB that it has downloaded, and its steps that take long.
# Bash takes a line when it comes. Some awks wait for a whole buffer of lines, and pip says least where it takes longest.
set -euo pipefail
whole=0 hundreds=0 file=

say() { printf '  %s\n' "$*"; }

while read -r -a words; do
    case "${words[*]}" in
        "Downloading "*) file=${words[1]##*/} ;;
        "Progress "[0-9]*)
            bytes=${words[1]} of=${words[3]}
            if (((whole + bytes) / 100000000 > hundreds)); then
                hundreds=$(((whole + bytes) / 100000000))
                say "downloaded ${hundreds}00 MB, now $file"
            fi
            if ((bytes == of)); then whole=$((whole + bytes)); fi
            ;;
        "Building editable "*": started") say "compiling csrc" ;;
        "Installing collected packages:"*) say "installing $((${#words[@]} - 3)) packages" ;;
    esac
done
