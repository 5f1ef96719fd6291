#!/usr/bin/env bash
# The engine's figures on a GPU, those that step.md and agreement.md speak of, in about a quarter of an hour:
#
#     make bench-gpu DATA=DIR    # DIR: where CIFAR-10 lies, as for `python -m experiments`
#
# Rows are appended as they are measured; those of agreement.jsonl that are there are not measured again.
# A row that cannot be measured takes no other with it. `PARTS="step pages"` leaves the rest for another time.
set -u
cd "$(dirname "$0")/.."
data=${1:?"give the directory with CIFAR-10"}
python=${PYTHON:-python} parts=${PARTS:-step agreement pages}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}

step() { # WAYS: how the rows are laid out
    local rows=() name
    for name in "uniform 32" "rho 32 of 320" "rho 32 of 320, folded, recent statistics" \
        "rho 32 of 320, shortlist of 60 %, folded, recent statistics" \
        "rho 32 of 320, shortlist of 75 %, folded, recent statistics" \
        "uniform 128" "rho 128 of 512" "rho 128 of 512, folded, recent statistics" \
        "rho 128 of 512, shortlist of 75 %, folded, recent statistics"; do
        rows+=("$name; $1")
    done
    rows+=("rho 32 of 320; $1, sort compiled" "rho 32 of 320, eager float32")
    "$python" benchmarks/bench_step.py --steps 300 --out benchmarks/results/step.jsonl --rows "${rows[@]}"
}

agreement() { "$python" -m benchmarks.bench_agreement "$@"; }

has() { [[ " $parts " == *" $1 "* ]]; }

if has step; then
    step "products, combined"
    step "products, combined, all algorithms" # what a process has tried it does not try again: one of its own
fi
if has agreement; then
    agreement scores --data "$data"
    agreement train --data "$data" --compile --steps 3000 --seeds 0 1 2 --options exact uniform \
        "folded, recent statistics" "gate, three quarters forwarded" "gate 75 %, folded, recent statistics" \
        "shortlist of 60 %, folded, recent statistics" "shortlist of 75 %, folded, recent statistics"
    agreement train --data "$data" --compile --steps 3000 --options exact replay "reuse, half forwarded" \
        "half resolution" proxy "gate, half forwarded"
    agreement train --data "$data" --compile --steps 1500 --k 128 --candidates 512 --seeds 0 1 2 \
        --options exact uniform "folded, recent statistics" "folded, recent statistics, overlapped" \
        "shortlist of 75 %, folded, recent statistics"
    agreement scores --data "$data" --k 128 --candidates 512 --options "folded, recent statistics" \
        "folded, recent statistics, overlapped" "shortlist of 75 %, folded, recent statistics"
fi
if has pages; then
    "$python" benchmarks/pages.py
fi
