#!/bin/bash
# What is to be proven and measured on a GPU, in calls of at most nine minutes: bash tests/gpu/all.sh [--dry] OUT
#
# Each stage is a process with a time of its own and appends its results to OUT/results.jsonl as it goes, the most
# important stages first, so a run that is cut off still counts. A stage that fails, hangs, ends without a word or for
# which no time was left is named, and the others run. The stages up to `ranks` always fit one call, the others a second.
# The last line on stdout is the summary, JSON. Ends with 1 if a stage was not passed.
#
# --dry    the same stages on a CPU: Triton's interpreter in place of compiled programs, tapes of graphs, gloo of NCCL;
#          it takes two to three minutes, but has ten times the time, as CPUs are shared
# STAGES   names of stages, to run only these;  SEED  of random inputs;  PYTHON  the interpreter
# SECONDS_IN_ALL  in place of 540;  SECONDS_<stage>  of one stage, in place of its own
set -u
dry=; [ "${1:-}" = --dry ] && { dry=--dry; shift; }
out=${1:?usage: all.sh [--dry] OUT}
python=${PYTHON:-python3}
patience=${dry:+10}
whole=${SECONDS_IN_ALL:-$((540 * ${patience:-1}))}
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
cd "$(dirname "$0")/../.." || exit 2
: >"$out/results.jsonl"
export PYTHONUNBUFFERED=1 TORCH_NCCL_ASYNC_ERROR_HANDLING=0 # NCCL's own watchdog would end the process first
[ -n "$dry" ] && export CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

# stage                 seconds that it may take
stages=(
    ceilings            30
    kernels            120
    tokens              75
    demo                60
    syncs               60
    capture             60
    nccl                25
    ranks               75
    attention           90
    roofline_llama      80
    roofline_qwen3      80
    roofline_mla        70
    flashinfer          60
)

say() { # stage, status, seconds, why; on a line of its own, after one that a stage was ended in as well
    [ -n "$(tail -c 1 "$out/results.jsonl")" ] && echo >>"$out/results.jsonl"
    printf '{"stage": "%s", "status": "%s", "seconds": %s, "why": "%s"}\n' "$@" >>"$out/results.jsonl"
}

child= clock=
ended() {
    for group in $child $clock; do kill -KILL -- "-$group" 2>/dev/null; done
    "$python" -m tests.gpu.stages.summary "$out" "${asked[@]}" $dry
    exit $?
}
asked=()
for ((at = 0; at < ${#stages[@]}; at += 2)); do
    [ -z "${STAGES:-}" ] || [[ " $STAGES " == *" ${stages[at]} "* ]] && asked+=("${stages[at]}")
done
trap ended TERM INT HUP

set -m # a stage leads a process group, so that all of it can be ended
for ((at = 0; at < ${#stages[@]}; at += 2)); do
    stage=${stages[at]} own=SECONDS_${stages[at]}
    most=${!own:-$((stages[at + 1] * ${patience:-1}))}
    [[ " ${asked[*]} " == *" $stage "* ]] || continue
    left=$((whole - SECONDS - 5))
    [ "$most" -gt "$left" ] && most=$left
    if [ "$most" -lt 5 ]; then
        say "$stage" "not run" 0 "no time was left"
        continue
    fi
    began=$SECONDS
    "$python" -m "tests.gpu.stages.$stage" "$out" $dry >"$out/$stage.log" 2>&1 &
    child=$!
    (sleep "$most" && kill -KILL -- "-$child") >/dev/null 2>&1 &
    clock=$!
    wait "$child" 2>/dev/null
    rc=$? took=$((SECONDS - began)) child=
    kill -KILL -- "-$clock" 2>/dev/null
    wait "$clock" 2>/dev/null
    clock=
    [ "$rc" = 137 ] && [ "$took" -lt "$most" ] && rc=killed
    case $rc in
        0) say "$stage" passed "$took" "" ;;
        1) say "$stage" failed "$took" "see its checks and $stage.log" ;;
        3) say "$stage" "not here" "$took" "see $stage.log" ;;
        137) say "$stage" cut "$took" "it was still running after $most s" ;;
        killed) say "$stage" killed "$took" "by another, for memory perhaps; see $stage.log" ;;
        *) say "$stage" ended "$took" "with $rc; see $stage.log" ;;
    esac
    tail -n 3 "$out/$stage.log" | sed "s/^/$stage: /"
done
ended
