#!/bin/sh
# The benchmark between two machines. Start it on both:
#
#   two_machines.sh ADDRESS NODE INTERFACE [RANKS [FLAG...]]
#
# ADDRESS    where both reach the first machine
# NODE       0 on the first machine, 1 on the other
# INTERFACE  by which this machine reaches the other; what it sends is counted
# RANKS      on each machine; 1 if not given
# FLAG       of python -m zero_nb.apps.bench, as --out FOLDER; the same on both
#
# The first machine prints the tables and leaves the files.
set -eu
if [ $# -lt 3 ]; then
    sed -n '2,12s/^# \{0,1\}//p' "$0" >&2
    exit 2
fi
address=$1 node=$2 interface=$3 ranks=${4:-1}
shift 3
[ $# = 0 ] || shift
export GLOO_SOCKET_IFNAME="$interface" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "${PYTHON:-python}" -m torch.distributed.run --nnodes 2 --nproc-per-node "$ranks" \
    --node-rank "$node" --master-addr "$address" --master-port "${MASTER_PORT:-29500}" \
    -m zero_nb.apps.bench --model gpt --parts times --rounds 3 --variants \
    control zero1 zero1-gradview zero1-overlap zero2 zero2-interleaved torch fsdp2 floor "$@"
