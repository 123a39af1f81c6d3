#!/bin/bash
# Runs all checks and measurements on a GPU, in calls of at most nine minutes: bash tests/gpu/all.sh [--dry] OUT
#
# Each stage is a process with its own time limit. It appends its results to OUT/results.jsonl while it runs. The most
# important stages run first, so a run that is cut off still gives useful results. If a stage fails, hangs, dies, or has
# no time left, the summary names it, and the other stages still run. The stages up to `ranks` always fit into one call,
# the others into a second one. The last line on stdout is the summary in JSON. The exit status is 1 if a stage did not
# pass.
#
# --dry    runs the same stages on a CPU: Triton's interpreter replaces compiled kernels, tapes replace graphs, and gloo
#          replaces NCCL. It takes two to three minutes; its time limits are ten times as long, because CPUs are shared.
# Environment variables:
# STAGES   names of the stages to run;  SEED  the seed of random inputs;  PYTHON  the Python interpreter
# SECONDS_IN_ALL  replaces the 540 s of a call;  SECONDS_<stage>  replaces the time limit of one stage
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

# stage                 time limit in seconds
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
    adaptive           150
    flashinfer          60
)

say() { # stage, status, seconds, why: writes them as a new line, also after an incomplete line of a killed stage
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

set -m # each stage leads a process group, so that all its processes can be killed
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
        killed) say "$stage" killed "$took" "killed from outside, perhaps for lack of memory; see $stage.log" ;;
        *) say "$stage" ended "$took" "exit status $rc; see $stage.log" ;;
    esac
    tail -n 3 "$out/$stage.log" | sed "s/^/$stage: /"
done
ended
