#!/bin/sh
# Runs the GPU tests that lie beside this file, on the GPU of this machine.

usage() {
    cat <<'END'
usage: sh run.sh [tests] [bench] [sanitize] [--out FOLDER]

  tests     run every test, one after the other (the default)
  bench     run the benches, and the same measurements with PyTorch where it is installed
  sanitize  run the tests under compute-sanitizer: memcheck, then racecheck

Everything printed is also kept in FOLDER (default: results). Fails when there is no GPU, when a
test fails or is ignored, and when none ran.

Variables: CUDA_LIBRARIES, a folder with the libraries of CUDA; SECONDS_PER_STAGE, after which a
stage is stopped (default 240); TEST_FILTER, a part of the names of the tests to run.
END
}

set -u
root=$(cd "$(dirname "$0")" && pwd) || exit 1
out=$root/results
stages=
while [ $# -gt 0 ]; do
    case $1 in
        tests | bench | sanitize) stages="$stages $1" ;;
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

# Runs the tests of every crate, under a tool if one is given, and counts them.
run_tests() {
    file=$1
    label=$2
    shift 2
    : >"$out/$file"
    ran=0
    for program in "$root"/programs/*.test; do
        crate=$(basename "$program" .test)
        echo "=== $label: $crate"
        # shellcheck disable=SC2086  # no word or one
        logged "$file" "$root/crates/$crate" "$@" "$program" --test-threads=1 ${TEST_FILTER:-} ||
            fail "$label of $crate (exit status $?)"
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
    echo "=== $label: $ran tests passed on $device" | tee -a "$out/summary.txt"
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

sanitize() {
    if ! sanitizer=$(tool compute-sanitizer); then
        fail "sanitize: compute-sanitizer is not installed"
        return
    fi
    # Smaller cases: every access costs many times more.
    export REPLAY_GPU_SMALL=1
    for check in memcheck racecheck; do
        run_tests "$check.txt" "$check" "$sanitizer" --tool "$check" --error-exitcode 86
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
        sanitize) sanitize ;;
    esac
done
if [ -n "$failed" ]; then
    echo "FAILED: ${failed#; }" | tee -a "$out/summary.txt" >&2
    exit 1
fi
echo "all passed" | tee -a "$out/summary.txt"
