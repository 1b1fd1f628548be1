#!/usr/bin/env bash
# Starts a training command again until its run is finished; gives up when it fails the same way without progress.
#   command   bash launch/supervise.sh RUN_FOLDER COMMAND...        (COMMAND should hold --resume latest)
#             bash launch/supervise.sh logs/first bash launch/hostfile.sh --logs logs --name first --resume latest ...
#   hardware  any; runs next to the launcher on one host
#   time      as long as the training; waits FIRST_WAIT (5) seconds before the first restart, twice as long before each
#             further one without progress, at most 300
# Several hosts: bash launch/supervise.sh --hostfile HOSTS --min-hosts 3 RUN_FOLDER \
#                 bash launch/hostfile.sh --global-batch-size 49152 --resume latest ...
# asks before each start which hosts of HOSTS answer, and gives the command those in a file named by $HOSTS, as long as
# they are MIN (1). --global-batch-size keeps the batch over fewer hosts, so only as many are taken as divide it (which
# numbers do is printed at the start; a MIN that only all hosts can meet is refused, unless it is their number); --batch N says
# the batch where the command does not. A hostfile or a MIN that is wrong ends this with 2.
# Finished means that RUN_FOLDER/summary.json is there: the launcher's exit code 0 is not trusted. Not restarted: a
# usage error (2), bad samples or non-finite steps (65), Ctrl-C (130), and a signal to this script, which is passed
# on first.
# The launch scripts take a relative --logs from the repository: started elsewhere, give RUN_FOLDER and --logs in full.
set -u
hostfile="" min_hosts=1 batch=""
while :; do
  case ${1:-} in
    --hostfile) hostfile=$(realpath -m "$2"); shift 2 ;;
    --min-hosts) min_hosts=$2; shift 2 ;;
    --batch) batch=$2; shift 2 ;;
    *) break ;;
  esac
done
[ $# -ge 2 ] || { echo "usage: $0 [--hostfile HOSTS --min-hosts N [--batch N]] RUN_FOLDER COMMAND..." >&2; exit 2; }
run=$1; shift
root=$(realpath "$(dirname "$0")/..")
refuse() { echo "supervise: $*" >&2; exit 2; }
value_of() {  # the last one counts, as in the program
  local name=$1 value=""
  while shift && [ $# -gt 0 ]; do
    case $1 in "$name") value=${2:-} ;; "$name"=*) value=${1#*=} ;; esac
  done
  echo "$value"
}
launched=""
for flag in "$@"; do
  case $flag in *launch/*.sh) launched=$flag ;; esac
done
case "$(value_of --logs "$@")" in
  /*) ;;
  *) [ -z "$launched" ] || [ "${run#/}" != "$run" ] || [ . -ef "$root" ] ||
    refuse "$launched takes a relative --logs from $root, RUN_FOLDER $run is one of $PWD: give both in full, or start there" ;;
esac
batch=${batch:-$(value_of --global-batch-size "$@")}
alive=$(mktemp); trap 'rm -f "$alive"' EXIT
first_wait=${FIRST_WAIT:-5} same_failures_allowed=${SAME_FAILURES:-3}
child=0 stopped=0 last="" same=0 wait_for=$first_wait

say() { echo "supervise: $*" >&2; }
progress() { cat "$run/checkpoints/latest" 2>/dev/null || echo "no checkpoint"; }
forward() {
  stopped=$1
  [ "$child" -gt 0 ] || return
  for _ in $(seq 600); do  # a child that has just been started is no group yet
    if kill -s "$2" -- "-$child" 2>/dev/null || ! kill -0 "$child" 2>/dev/null; then return; fi
    sleep 0.05
  done
}
end_stopped() { say "stopped; $(progress)"; exit "$stopped"; }
trap 'forward 143 TERM' TERM
trap 'forward 138 USR1' USR1
trap 'forward 130 INT' INT

choose_hosts() {
  [ -n "$hostfile" ] || return 0
  (cd "$root" && python infcl/cluster/hostfile.py alive "$hostfile" --min-hosts "$min_hosts" \
    ${batch:+--global-batch-size "$batch"}) > "$alive" || return
  export HOSTS=$alive
  say "on $(tr '\n' ' ' < "$alive")"
}

if [ -n "$hostfile" ]; then
  counts=$(cd "$root" && python infcl/cluster/hostfile.py counts "$hostfile" --min-hosts "$min_hosts" \
    ${batch:+--global-batch-size "$batch"}) || exit
  say "$counts"
fi
while :; do
  choose_hosts; chosen=$?
  [ "$stopped" -gt 0 ] && end_stopped
  if [ "$chosen" -eq 0 ]; then
    setsid "$@" &
    child=$!
    while :; do  # a trapped signal ends `wait` early
      wait "$child"; code=$?
      kill -0 "$child" 2>/dev/null || break
    done
  else
    code=69 child=0
  fi
  if [ "$child" -gt 0 ]; then
    for _ in $(seq 60); do kill -0 -- "-$child" 2>/dev/null || break; sleep 0.5; done
    kill -s KILL -- "-$child" 2>/dev/null  # whoever stayed behind
  fi
  if [ -e "$run/summary.json" ]; then say "$run is finished"; exit 0; fi
  [ "$stopped" -gt 0 ] && end_stopped
  case $code in
    2) say "the command is wrong (exit code 2); not restarted"; exit 2 ;;
    65) say "too many bad samples or non-finite steps (exit code 65); not restarted"; exit 65 ;;
    130) say "interrupted; not restarted"; exit 130 ;;
  esac
  now="exit code $code at $(progress)"
  if [ "$now" = "$last" ]; then same=$((same + 1)); else same=1 wait_for=$first_wait; fi
  last=$now
  if [ "$same" -ge "$same_failures_allowed" ]; then
    say "$now, $same times in a row; giving up: there is no $(realpath -m "$run")/summary.json"
    [ "$code" -eq 0 ] && exit 1
    exit "$code"
  fi
  say "$now; restart in $wait_for s"
  child=0
  for ((second = 0; second < wait_for && stopped == 0; second++)); do sleep 1; done  # a trap waits for its end
  wait_for=$((wait_for * 2 > 300 ? 300 : wait_for * 2))
done
