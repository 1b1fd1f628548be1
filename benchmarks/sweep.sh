#!/bin/bash
# Measure each line of a file with benchmarks.step, in processes of its own: bash benchmarks/sweep.sh FILE CSV
sed 's/#.*//; s/ *$//' "$1" | xargs -L 1 timeout -k 40 120 python -m benchmarks.step --csv "$2"
