#!/bin/sh
# Runs the GPU tests that lie beside this file, on the GPU of this machine.

usage() {
    cat <<'END'
usage: sh run.sh [tests] [bench] [sanitize | memcheck | racecheck] [--out FOLDER]

  tests     run every test, one after the other (the default)
  bench     run the benches, and the same measurements with PyTorch where it is installed
  sanitize  run the tests under compute-sanitizer: memcheck, then racecheck
  memcheck  that alone. Tests called probes:: are legal programs: where memcheck reports one, it is
            not believed about the memory of graphs, the other tests run with memory of their own
            in its place, and the summary says so
  racecheck that alone

Everything printed is also kept in FOLDER (default: results). Fails when there is no GPU, when a
test fails or is ignored, and when none ran.

Variables: CUDA_LIBRARIES, a folder with the libraries of CUDA; SANITIZER, the compute-sanitizer to
use; SECONDS_PER_STAGE, after which a stage is stopped (default 240); TEST_FILTER, a part of the
names of the tests to run.
END
}

set -u
root=$(cd "$(dirname "$0")" && pwd) || exit 1
out=$root/results
stages=
while [ $# -gt 0 ]; do
    case $1 in
        tests | bench | sanitize | memcheck | racecheck) stages="$stages $1" ;;
        --out)
            [ $# -gt 1 ] || { usage >&2; exit 2; }
            out=$2
            shift
            ;;
        --help | -h) usage; exit 0 ;;
        *) usage >&2; exit 2 ;;
    esac
    shift
done
: "${stages:=tests}"
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 1
failed=

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

device=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -n 1)
if [ -z "$device" ]; then
    echo "FAILED: no GPU: nvidia-smi names none" >&2
    exit 1
fi
own_path=${LD_LIBRARY_PATH:-}
for folder in $(library_folders); do
    LD_LIBRARY_PATH=${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}$folder
done
export LD_LIBRARY_PATH
for program in "$root"/programs/*; do
    missing=$(ldd "$program" 2>/dev/null | awk '/not found/ { print $1 }')
    if [ -n "$missing" ]; then
        echo "FAILED: libraries that no folder has:" $missing >&2
        exit 1
    fi
done

# Says something that is to be read later too.
note() {
    echo "=== $*" | tee -a "$out/summary.txt"
}

# Runs the tests of every crate, under a tool if one is given, and counts them. `selection` may hold
# options that leave tests out.
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
    done
    for count in $(sed -n 's/^test result: .* \([0-9]*\) passed; .*/\1/p' "$out/$file"); do
        ran=$((ran + count))
    done
    if grep -q '^test .* \.\.\. ignored' "$out/$file"; then
        fail "$label: tests were ignored"
    fi
    if [ "$ran" -eq 0 ]; then
        fail "$label: no test ran"
    fi
    note "$label: $ran tests passed on $device"
}

run_benches() {
    : >"$out/bench.txt"
    for program in "$root"/programs/*.bench; do
        [ -e "$program" ] || continue
        name=$(basename "$program" .bench)
        echo "=== bench: $name"
        logged bench.txt "$root" "$program" --bench --json "$out/$name.json" || fail "bench $name"
    done
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
        crate=${crate%.unit}
        for test in $("$program" --list 2>/dev/null | sed -n "s/^\\($prefix[^ ]*\\): test\$/\\1/p"); do
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

{
    echo "date: $(date -u '+%Y-%m-%d %H:%M UTC')"
    echo "device, driver: $device"
    echo "command: sh run.sh$stages"
} | tee "$out/summary.txt"
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
echo "all passed" | tee -a "$out/summary.txt"
