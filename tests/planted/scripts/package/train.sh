#!/bin/bash
# No Python: any program may print lines.  ./train.sh NUM_STEPS
[ -z "${RANK+set}" ] || exit 9
for step in $(seq 0 "$1"); do
  sleep 0.05
  echo "iter $step: loss 5.5, time 50.00ms, mfu 1%"
done
echo "step $1: train loss 5.5, val loss 5.5"
