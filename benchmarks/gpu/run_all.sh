#!/usr/bin/env bash
# Everything that only a GPU shows, in one command. Each piece is stopped after ten minutes.
#
#     benchmarks/gpu/run_all.sh [OUT] [PIECE ...]      # default: results/gpu, all pieces
#     RANKZERO_SMALL=1 benchmarks/gpu/run_all.sh /tmp/out checks     # a trial on a CPU
#
# PYTHON=python3 names the interpreter. A piece that fails does not keep the others from running.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../../.venv/bin/python}
out=$(realpath -m "${1:-$here/../results/gpu}")
mkdir -p "$out"
pieces=("${@:2}")
[ "${#pieces[@]}" -gt 0 ] || pieces=(checks ladder overlap checkpoints)
export PYTHONPATH=$here:$here/..:$here/../../platform${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
failed=()
for piece in "${pieces[@]}"; do
    echo "== $piece, $(date +%T)"
    case $piece in
        checks) command=("$here/checks.py" "$out") ;;
        ladder | overlap | checkpoints) command=("$here/$piece.py" "$out") ;;
        *) echo "no piece is called $piece: checks, ladder, overlap, checkpoints"; exit 2 ;;
    esac
    timeout 580 "$python" "${command[@]}" 2>&1 | tee "$out/$piece.log" || failed+=("$piece")
done
echo "== done; failed: ${failed[*]:-none}; results in $out"
[ "${#failed[@]}" -eq 0 ]
