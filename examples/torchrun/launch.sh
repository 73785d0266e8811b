#!/usr/bin/env bash
# Two nodes, of two ranks and of one, emulated on this machine. On a real cluster, each node runs its own torchrun.
set -euo pipefail

script="$(dirname "$0")/train.py"
port="${MASTER_PORT:-29511}"

node() { # its number, and how many ranks it runs
    python -m torch.distributed.run --nnodes 2 --node-rank "$1" --nproc-per-node "$2" \
        --master-addr 127.0.0.1 --master-port "$port" "$script"
}

node 0 2 &
first=$!
trap 'kill "$first" 2>/dev/null || true' EXIT # leave nothing behind, whatever happens
node 1 1
wait "$first"
