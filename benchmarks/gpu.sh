#!/usr/bin/env bash
# The engine's figures on a GPU, those that step.md and agreement.md speak of, in less than half an hour:
#
#     make bench-gpu DATA=DIR    # DIR: where CIFAR-10 lies, as for `python -m experiments`
#
# Rows are appended as they are measured; those of agreement.jsonl that are there are not measured again.
# A row that cannot be measured takes no other with it. `PARTS="step pages"` leaves the rest for another time:
# step (4 minutes), layouts (3), algorithms (3), scores (2), train (4), others (2), larger (5), pages.
# `RESULTS=DIR` appends to files there, which begin as the committed ones; pages are made of the latter.
set -u
data=$(realpath "${1:?"give the directory with CIFAR-10"}") results=$(realpath -m "${RESULTS:-$(dirname "$0")/results}")
cd "$(dirname "$0")/.."
all="step layouts algorithms scores train others larger pages"
python=${PYTHON:-python} parts=${PARTS:-$all}
for part in $parts; do
    [[ " $all " == *" $part "* ]] || { echo "PARTS has $part, but there are $all" >&2; exit 2; }
done
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
mkdir -p "$results"
for name in step.jsonl agreement.jsonl; do
    [[ -e $results/$name ]] || cp "benchmarks/results/$name" "$results"
done
recent="folded, recent statistics" following="folded, following means"
ahead="$following, overlapped, ahead"

step() {
    "$python" benchmarks/bench_step.py --steps 300 --out "$results/step.jsonl" --rows "$@"
}

agreement() {
    "$python" -m benchmarks.bench_agreement "$@" --data "$data" --out "$results/agreement.jsonl"
}

has() { [[ " $parts " == *" $1 "* ]]; }

if has step; then
    step "uniform 32" "rho 32 of 320" "rho 32 of 320, $recent" "rho 32 of 320, $following" \
        "rho 32 of 320, $ahead" "rho 32 of 320, overlapped, ahead" "rho 32 of 320, shortlist of 85 %, $ahead" \
        "uniform 128" "rho 128 of 512" "rho 128 of 512, $recent" "rho 128 of 512, $following" \
        "rho 128 of 512, $ahead" "rho 128 of 512, overlapped, ahead" "rho 128 of 512, shortlist of 85 %, $ahead"
fi
if has layouts; then
    step "uniform 32; products, combined" "uniform 32; products, combined, sums" \
        "rho 32 of 320; products, combined, sort compiled" \
        "rho 32 of 320; products, combined, sort compiled, sums in scoring" \
        "rho 32 of 320; products, combined, sort compiled, sums" "rho 32 of 320, eager float32" \
        "rho 32 of 320, $following; products, combined" "rho 32 of 320, $ahead; products, combined" \
        "rho 32 of 320, shortlist of 85 %, $ahead; products, combined" "uniform 128; products, combined" \
        "rho 128 of 512, $ahead; products, combined" \
        "rho 128 of 512, shortlist of 85 %, $ahead; products, combined"
fi
if has algorithms; then
    # What a process has tried it does not try again: one of its own.
    step "uniform 32; products, combined, all algorithms" \
        "rho 32 of 320; products, combined, all algorithms, sort compiled" \
        "rho 32 of 320, $following; products, combined, all algorithms" \
        "rho 32 of 320, $ahead; products, combined, all algorithms" "rho 32 of 320, eager float32"
fi
if has scores; then
    agreement scores --options "$recent" "$following" "$ahead" "shortlist of 85 %, $ahead" overlapped \
        "overlapped, ahead" "eval BatchNorm" "folded, statistics of 32" "shortlist of 75 %, $recent" \
        "gate, three quarters forwarded" "gate, half forwarded" "reuse, half forwarded" "half resolution" proxy
fi
if has train; then
    agreement train --compile --steps 3000 --seeds 0 1 2 --options exact uniform "$recent" "$following" \
        "$ahead" "shortlist of 85 %, $ahead" "overlapped, ahead" "gate, three quarters forwarded" \
        "shortlist of 75 %, $recent"
fi
if has others; then
    agreement train --compile --steps 3000 --options exact replay "reuse, half forwarded" \
        "half resolution" proxy "gate, half forwarded"
fi
if has larger; then
    larger=("$recent" "$following" "$ahead" "shortlist of 85 %, $ahead" "overlapped, ahead")
    agreement scores --k 128 --candidates 512 --options "${larger[@]}"
    agreement train --compile --steps 1500 --k 128 --candidates 512 --seeds 0 1 2 --options exact uniform \
        "${larger[@]}"
fi
if has pages; then
    "$python" benchmarks/pages.py
fi
