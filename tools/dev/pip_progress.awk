# Of all that pip says with `--progress-bar raw`: each 100 MB that it has downloaded, and its steps that take long.
function say(line) { print "  " line; fflush() }

/^ *Downloading / { file = $2; sub(/.*\//, "", file) }
/^Progress / {
  if (int((whole + $2) / 1e8) > said) { said = int((whole + $2) / 1e8); say("downloaded " said * 100 " MB, now " file) }
  if ($2 == $4) whole += $2
}
/^ *Building editable / && !building++ { say("compiling csrc") }
/^Installing collected packages/ { say("installing " NF - 3 " packages") }
