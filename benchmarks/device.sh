#!/usr/bin/env bash
# Everything that only a CUDA machine can tell, in at most eight minutes on an H200:
#
#   benchmarks/device.sh                 results to $OUT, or else benchmarks/results/device/
#   benchmarks/device.sh check dense     some parts only; benchmarks/device.py lists them
#   benchmarks/device.sh --dry           the same commands, tiny and on the CPU: does the script itself work?
#
# Needs torch, lightning, timm and numpy; neither `datasets`, `jsonargparse` nor a network. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python3}" -m benchmarks.device --output "${OUT:-benchmarks/results/device}" "$@"
