#!/bin/sh
# Runs the GPU tests that lie beside this file, on the GPU of this machine.

usage() {
    cat <<'END'
usage: sh run.sh [tests] [bench] [sanitize | memcheck | racecheck] [--out FOLDER]

  tests     run every test, one after the other (the default)
  bench     run the benches, and the same measurements with PyTorch where it is installed. A bench
            that plans its time is given nine tenths of SECONDS_PER_STAGE
  sanitize  run the tests under compute-sanitizer: memcheck, then racecheck
  memcheck  that alone. Tests called probes:: are legal programs: where memcheck reports one, it is
            not believed about the memory of graphs, the other tests run with memory of their own
            in its place, and the summary says so
  racecheck that alone

Everything printed is also kept in FOLDER (default: results, beside this file). The last line of
summary.txt there is "all passed", or that it was a partial run, or what failed; without one of these
the run did not end. Fails when there is no GPU, when a test fails or is ignored, when a program runs
no test, and when there is no bench to run.

Variables: CUDA_LIBRARIES, a folder with the libraries of CUDA; SANITIZER, the compute-sanitizer to
use; SECONDS_PER_STAGE, after which each program of a stage is stopped (default 240); TEST_FILTER, a
part of the names of the tests to run, which makes the run a partial one. REPLAY_GPU_SMALL and
REPLAY_GPU_PLAIN_MEMORY are set by the stages that need them; those set outside are not used.
END
}

set -u
# With it, `cd` to a relative folder could lead elsewhere.
unset CDPATH
root=$(cd "$(dirname "$0")" && pwd) || exit 1
out=$root/results
stages=
while [ $# -gt 0 ]; do
    case $1 in
        tests | bench | sanitize | memcheck | racecheck) stages="$stages $1" ;;
        --out)
            [ $# -gt 1 ] || { usage >&2; exit 2; }
            out=$2
            case $out in
                '' | -*)
                    echo "--out: expected a folder, got '$out' (a folder of such a name: ./$out)" >&2
                    exit 2
                    ;;
            esac
            shift
            ;;
        --help | -h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
    shift
done
: "${stages:= tests}"
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
failed=

# The summary of another run must not stand for this one, wherever this one ends.
{
    echo "date: $(date -u '+%Y-%m-%d %H:%M UTC')"
    echo "command: sh run.sh$stages"
} >"$out/summary.txt" || exit 1
cat "$out/summary.txt"

# Says something that is to be read later too.
note() {
    echo "=== $*" | tee -a "$out/summary.txt"
}

# Ends a run that cannot begin.
refuse() {
    echo "FAILED: $*" | tee -a "$out/summary.txt" >&2
    exit 1
}

fail() {
    echo "FAILED: $*" >&2
    failed="$failed; $*"
}

# Runs a command in a folder, shows its output and appends it to a file; gives the command's status.
logged() {
    # Not `file`: sh has no local variables, and callers go on using theirs.
    log=$out/$1
    folder=$2
    shift 2
    limit=
    if command -v timeout >/dev/null; then
        limit="timeout ${SECONDS_PER_STAGE:-240}"
    fi
    {
        # shellcheck disable=SC2086  # two words or none
        (cd "$folder" && $limit "$@" 2>&1)
        echo $? >"$out/.status"
    } | tee -a "$log"
    read -r status <"$out/.status"
    rm -f "$out/.status"
    if [ "$status" -eq 124 ] && [ -n "$limit" ]; then
        echo "stopped: not done after ${limit#timeout } seconds (SECONDS_PER_STAGE)" | tee -a "$log"
    fi
    return "$status"
}

# Folders that may hold the libraries of CUDA: of a toolkit, of the Python packages, of the driver.
library_folders() {
    for folder in "${CUDA_LIBRARIES:-}" "${CUDA_HOME:-}/lib64" "${CUDA_PATH:-}/lib64" \
        /usr/local/cuda/lib64 /usr/local/cuda-*/lib64 /usr/local/nvidia/lib64; do
        [ -d "$folder" ] && echo "$folder"
    done
    python3 - 2>/dev/null <<'END'
import glob, site, sys
for path in dict.fromkeys(sys.path + site.getsitepackages()):
    for folder in sorted(glob.glob(path + "/nvidia/*/lib")):
        print(folder)
END
}

# Finds a program of the toolkit that may not be on PATH.
tool() {
    command -v "$1" && return
    for folder in "${CUDA_HOME:-}/bin" /usr/local/cuda/bin /usr/local/cuda-*/bin \
        /opt/nvidia/nsight-compute/*/host/target-linux-x64/sanitizer /usr/local/cuda*/compute-sanitizer; do
        [ -x "$folder/$1" ] && echo "$folder/$1" && return
    done
    return 1
}

# What it prints is no device when it fails: its messages go to standard output as well.
device=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1)
status=$?
device=$(echo "$device" | head -n 1)
if [ "$status" -ne 0 ]; then
    refuse "no GPU: nvidia-smi failed (exit status $status): $device"
fi
if [ -z "$device" ]; then
    refuse "no GPU: nvidia-smi names none"
fi
echo "device, driver: $device" | tee -a "$out/summary.txt"

partial=
if [ -n "${TEST_FILTER:-}" ]; then
    partial="TEST_FILTER=$TEST_FILTER"
    note "partial: only tests whose names match TEST_FILTER=$TEST_FILTER"
fi
[ -z "${SECONDS_PER_STAGE:-}" ] || note "SECONDS_PER_STAGE=$SECONDS_PER_STAGE"
# A run is what its stages say, whatever was exported for another.
if [ -n "${REPLAY_GPU_SMALL+set}" ]; then
    note "not used: REPLAY_GPU_SMALL=$REPLAY_GPU_SMALL, which the stages set themselves"
    unset REPLAY_GPU_SMALL
fi
if [ -n "${REPLAY_GPU_PLAIN_MEMORY+set}" ]; then
    note "not used: REPLAY_GPU_PLAIN_MEMORY=$REPLAY_GPU_PLAIN_MEMORY, which the stages set themselves"
    unset REPLAY_GPU_PLAIN_MEMORY
fi

own_path=${LD_LIBRARY_PATH:-}
# One folder a line: a name may have spaces.
own_separators=$IFS
IFS='
'
for folder in $(library_folders); do
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
IFS=$own_separators
export LD_LIBRARY_PATH
for program in "$root"/programs/*; do
    missing=$(ldd "$program" 2>/dev/null | awk '/not found/ { print $1 }')
    if [ -n "$missing" ]; then
        # shellcheck disable=SC2086  # one line
        refuse "libraries that $(basename "$program") needs and no folder has:" $missing
    fi
done

# How many tests passed, by the results in a file.
passed() {
    sed -n 's/^test result: .* \([0-9]*\) passed; .*/\1/p' "$out/$1" | awk '{ n += $1 } END { print n + 0 }'
}

# Runs the tests of every crate, under a tool if one is given, and counts them. `selection` may hold
# options that leave tests out. A program that runs none fails, unless TEST_FILTER may leave it none.
selection=
run_tests() {
    file=$1
    label=$2
    shift 2
    : >"$out/$file"
    ran=0
    for program in "$root"/programs/*.test; do
        name=$(basename "$program" .test)
        crate=${name%.unit}
        filter=${TEST_FILTER:-}
        # The unit tests of a crate that need no GPU run without one.
        [ "$name" = "$crate" ] || filter=${filter:-gpu_}
        echo "=== $label: $name"
        # shellcheck disable=SC2086  # any number of words
        logged "$file" "$root/crates/$crate" "$@" "$program" --test-threads=1 $selection $filter ||
            fail "$label of $name (exit status $?)"
        before=$ran
        ran=$(passed "$file")
        if [ "$ran" -eq "$before" ] && [ -z "$partial" ]; then
            fail "$label: no test of $name ran"
        fi
    done
    if grep -q -e '^test .* \.\.\. ignored' -e '^test result: .* [1-9][0-9]* ignored;' "$out/$file"; then
        fail "$label: tests were ignored"
    fi
    if [ "$ran" -eq 0 ]; then
        fail "$label: no test ran"
    fi
    note "$label: $ran tests passed on $device"
}

run_benches() {
    : >"$out/bench.txt"
    # Of the time after which it is stopped, a bench may plan with nine tenths.
    budget=$((${SECONDS_PER_STAGE:-240} * 9 / 10))
    benches=0
    # What another run left must not be taken for this one's.
    rm -f "$out"/*.peer_torch.json
    for script in "$root"/peers/*.py; do
        [ -e "$script" ] || continue
        name=$(basename "$script" .py)
        echo "=== peer: $name"
        if python3 -c 'import torch' 2>/dev/null; then
            # With the libraries that it brings.
            logged bench.txt "$root" env LD_LIBRARY_PATH="$own_path" \
                python3 "$script" --json "$out/$name.json" || fail "peer $name"
        else
            echo "PyTorch is not installed: not measured" | tee -a "$out/bench.txt"
        fi
    done
    for program in "$root"/programs/*.bench; do
        [ -e "$program" ] || continue
        name=$(basename "$program" .bench)
        benches=$((benches + 1))
        echo "=== bench: $name"
        peer=$out/${name%%.*}.peer_torch.json
        # Those that neither draw nor plan their time nor compare take no notice.
        set --
        [ ! -e "$peer" ] || set -- --peer "$peer"
        logged bench.txt "$root" "$program" --bench --json "$out/$name.json" \
            --svg "$out/$name.svg" --budget "$budget" "$@" || fail "bench $name"
    done
    if [ "$benches" -eq 0 ]; then
        fail "bench: no bench among the programs"
        return
    fi
    note "bench: $benches programs ran on $device"
}

# The exit status of a sanitizer that has something to report.
readonly reported=86

# Runs one crate's tests of a kind under memcheck, each in a process of its own: a report ends what
# the process has on the device. `reports` has the names of those that memcheck reports.
memcheck_each() {
    file=$1
    prefix=$2
    shift 2
    : >"$out/$file"
    reports=
    for program in "$root"/programs/*.test; do
        crate=$(basename "$program" .test)
        # Unit tests that need a GPU are named for it, and are none of these kinds.
        case $crate in *.unit) continue ;; esac
        if ! list=$("$program" --list 2>>"$out/$file"); then
            fail "memcheck: $(basename "$program") cannot list its tests"
            continue
        fi
        for test in $(echo "$list" | sed -n "s/^\\(${prefix}[^ ]*\\): test\$/\\1/p"); do
            logged "$file" "$root/crates/$crate" "$@" "$program" --exact "$test" >/dev/null
            status=$?
            case $status in
                0) echo "    $test: nothing" ;;
                "$reported") echo "    $test: reported" && reports="$reports $test" ;;
                *) fail "memcheck of $test (exit status $status)" ;;
            esac
        done
    done
}

memcheck() {
    # Tests provoke errors of driver calls and judge them themselves.
    set -- "$sanitizer" --tool memcheck --error-exitcode "$reported" --report-api-errors no
    echo "=== memcheck of legal programs"
    memcheck_each memcheck-probes.txt probes:: "$@"
    if [ -z "$reports" ]; then
        run_tests memcheck.txt memcheck "$@"
        return
    fi
    note "memcheck reports legal programs on this machine:$reports"
    export REPLAY_GPU_PLAIN_MEMORY=1
    selection="--skip probes:: --skip memory::"
    run_tests memcheck.txt "memcheck, with plain memory in graphs" "$@"
    selection=
    unset REPLAY_GPU_PLAIN_MEMORY
    echo "=== memcheck of tests about the memory of graphs"
    memcheck_each memcheck-memory.txt memory:: "$@"
    if [ -n "$reports" ]; then
        note "memcheck, not believed for the reason above:$reports"
    fi
}

racecheck() {
    run_tests racecheck.txt racecheck "$sanitizer" --tool racecheck --error-exitcode "$reported"
}

# Runs checks under the sanitizer.
sanitize() {
    if ! sanitizer=${SANITIZER:-$(tool compute-sanitizer)}; then
        fail "sanitize: compute-sanitizer is not installed"
        return
    fi
    note "compute-sanitizer: $("$sanitizer" --version | grep -i version)"
    # Smaller cases: every access costs many times more.
    export REPLAY_GPU_SMALL=1
    for check in "$@"; do
        "$check"
    done
    unset REPLAY_GPU_SMALL
}

for stage in $stages; do
    case $stage in
        tests) run_tests tests.txt tests ;;
        bench) run_benches ;;
        sanitize) sanitize memcheck racecheck ;;
        memcheck | racecheck) sanitize "$stage" ;;
    esac
done
if [ -n "$failed" ]; then
    echo "FAILED: ${failed#; }" | tee -a "$out/summary.txt" >&2
    exit 1
fi
if [ -n "$partial" ]; then
    echo "partial: what was chosen passed ($partial)" | tee -a "$out/summary.txt"
    exit 0
fi
echo "all passed" | tee -a "$out/summary.txt"
