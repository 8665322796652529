#!/usr/bin/env bash
# From nothing to a verdict: set up, get data, check the machine, run the track's repeats.  ./speedrun.sh [overrides]
exec "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")/run.sh" speedrun "$@"
