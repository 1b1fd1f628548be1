#!/usr/bin/env bash
# Trains over the hosts of a hostfile ("worker-1 slots=8", one per line; ssh without a password to each; same paths on all).
#   command   HOSTS=hosts bash launch/hostfile.sh --train-data '/data/{00000..41455}.tar' --tokenizer spm.model ...
#             LAUNCHER=openmpi HOSTS=hosts INTERFACE=ib0 bash launch/hostfile.sh ...
#   hardware  any number of hosts with GPUs; on the launching host pdsh, or mpirun
#   time      as long as the training; the first step comes about a minute after the start
# HOSTS may be relative to where this is started; a relative path in the flags is one of the repository, on each host.
# First check: launch/check.sh HOSTS. INTERFACE=eth0 is the network interface of NCCL, gloo and the rendezvous. Flags may hold
# spaces and shell characters (the login shell of the hosts has to be bash). A host that stops answering is given up after
# half a minute, and the run with it. Of the environment only PYTHON*, NCCL* and what .deepspeed_env lists (KEY=VALUE lines, no
# blank or comment line) reaches the other hosts, in a command line that every user there can read: no keys in it.
set -euo pipefail
HOSTS=$(realpath -m "${HOSTS:-hosts}")
cd "$(dirname "$0")/.."
source launch/quote.sh
LAUNCHER=${LAUNCHER:-pdsh} PORT=${PORT:-29500}
fail() { echo "launch/hostfile.sh: $*" >&2; exit 2; }
python infcl/cluster/hostfile.py check "$HOSTS"  # -m would import torch

for file in "${DS_ENV_FILE:-.deepspeed_env}" ~/"${DS_ENV_FILE:-.deepspeed_env}"; do
  [ -r "$file" ] || continue
  name='^[[:blank:]]*(export[[:blank:]]+)?[A-Z0-9_]*'
  secret=$(grep -iE -e "$name(KEY|TOKEN|SECRET|PASSW|PASSPHRASE|_PWD)[A-Z0-9_]*=" -e "${name}_AUTH=" \
    -e "${name}CREDENTIALS?=[^/~]" -e "$name=.*://[^/@[:blank:]]*:[^/@[:blank:]]*@" "$file" \
    | grep -viE '^[[:blank:]]*NCCL_IB_PKEY=' | sed 's/=.*//; s/.*[[:blank:]]//' | head -1) || true
  [ -z "$secret" ] || fail "$file holds ${secret}: it would stand in the command line on every host; leave it in a file there (~/.netrc, ~/.aws/credentials)"
done

first=$(awk '{sub(/[#\r].*/, "")} NF {print $1; exit}' "$HOSTS")
on_first() { ssh -oBatchMode=yes -oConnectTimeout=20 "$first" "$@"; }
if [ -n "${INTERFACE:-}" ]; then
  export NCCL_SOCKET_IFNAME="=$INTERFACE" GLOO_SOCKET_IFNAME=$INTERFACE  # pdsh takes gloo's from .deepspeed_env only
  address=$(on_first ip -o addr show dev "$INTERFACE" scope global \
    | awk '$3 ~ /^inet6?$/ {print $3, $4}' | sort | awk '{print $2; exit}') || true  # IPv4 where it has both
else  # below whatever a login prints
  is_address='^[0-9]+[.][0-9]+[.][0-9]+[.][0-9]+$|^[0-9a-fA-F]*:[0-9a-fA-F]*:[0-9a-fA-F:]*$'
  address=$(on_first hostname -I | awk -v is_address="$is_address" '$1 ~ is_address {last = $1} END {print last}') || true
fi
[ -n "$address" ] || fail "no address of $first${INTERFACE:+ on its interface $INTERFACE} (ssh to it, and hostname -I or ip there)"
options=(-q --hostfile "$HOSTS" --master_addr "${address%/*}" --master_port "$PORT" --force_multi --no_ssh_check)

with_pdsh() {
  local alive="-oBatchMode=yes -oConnectTimeout=20 -oServerAliveInterval=10 -oServerAliveCountMax=3"
  export PDSH_SSH_ARGS_APPEND="${PDSH_SSH_ARGS_APPEND:-} $alive"
  local quoted=() flag
  for flag in "${flags[@]}"; do quoted+=("$(quote "$flag")"); done
  exec deepspeed "${options[@]}" --launcher pdsh "${script[@]}" "${quoted[@]}"
}

with_openmpi() {
  local mca=(${INTERFACE:+--mca btl_tcp_if_include "$INTERFACE" --mca oob_tcp_if_include "$INTERFACE" -x NCCL_SOCKET_IFNAME -x GLOO_SOCKET_IFNAME})
  [ "$(id -u)" -ne 0 ] || mca+=(--allow-run-as-root)
  mca+=(-x PATH -x "MASTER_ADDR=${address%/*}" -x "MASTER_PORT=$PORT")
  exec deepspeed "${options[@]}" --launcher openmpi --launcher_args "${mca[*]}" "${script[@]}" "${flags[@]}"
}

case $LAUNCHER in pdsh | openmpi) ;; *) fail "LAUNCHER=$LAUNCHER: pdsh or openmpi" ;; esac
script=(${SCRIPT:-pretrain_clip.py})
flags=("$@")
[ -n "${SCRIPT:-}" ] || flags=(--deepspeed_config "${PRESET:-ds_configs/zero1.json}" "${flags[@]}")
"with_$LAUNCHER"
