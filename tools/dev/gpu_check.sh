#!/usr/bin/env bash
# All that only a GPU can show, in one run of less than 8 minutes on one GPU:
#   bash tools/dev/gpu_check.sh [--output FOLDER] [--device cpu] [--quick]
# It builds csrc here, holds every kernel against its reference, runs the tests of tests/gpu, and measures speed and
# memory. A step that fails does not keep the next ones from running; the exit status is 1 then. In FOLDER (gpu_check)
# lie the output of each step and the measurements as JSON. `--device cpu --quick` tries the steps themselves where there
# is no GPU: tiny sizes, and of the tests only whether they can be collected.
# Needs torch, and to build: cmake, ninja and pybind11 for the Python that is used, which is .venv's where there is one.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

output=gpu_check device=cuda quick=()
while (($#)); do
    case $1 in
        --output) output=$2; shift 2 ;;
        --device) device=$2; shift 2 ;;
        --quick) quick=(--quick); shift ;;
        *) echo "$1: not known; see the first lines of tools/dev/gpu_check.sh" >&2; exit 2 ;;
    esac
done
if [[ -z ${PYTHON:-} ]]; then
    PYTHON=python3
    [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$output"

if [[ $device == cuda ]] && ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "torch sees no GPU: nothing can be checked here; --device cpu --quick tries the steps on a CPU" >&2
    exit 2
fi

failed=()
summary=""
# step NAME SECONDS COMMAND …: at most so many seconds, the output also in FOLDER/NAME.log
step() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "$@" 2>&1 | tee "$output/$name.log"
    status=${PIPESTATUS[0]}
    summary+="$(printf '%-10s %4d s  ' "$name" $((SECONDS - start)))"
    if ((status)); then
        failed+=("$name")
        summary+="FAILED (exit status $status$( ((status == 124)) && echo ', out of time'))"
    else
        summary+="passed"
    fi
    summary+=$'\n'
}

# .venv has its own way to build. Elsewhere the module is put beside the sources, with kernels for this GPU alone.
build() {
    local cuda=AUTO architecture=
    if [[ $device == cuda ]]; then
        cuda=ON
        architecture=$("$PYTHON" -c 'import torch; print("%d%d" % torch.cuda.get_device_capability())') || return
    fi
    if [[ $PYTHON == .venv/bin/python ]]; then
        SKBUILD_CMAKE_DEFINE="MEGATRON_CUDA=$cuda" make kernels
        return
    fi
    local pybind11
    pybind11=$("$PYTHON" -m pybind11 --cmakedir) || return
    cmake -S csrc -B "$output/build" -G Ninja "-DMEGATRON_CUDA=$cuda" "-DCMAKE_CUDA_ARCHITECTURES=${architecture:-80}" \
        "-Dpybind11_DIR=$pybind11" "-DPython_EXECUTABLE=$(command -v "$PYTHON")" &&
        cmake --build "$output/build" &&
        cp "$output"/build/_C.*.so megatron/
}
export -f build
export PYTHON output device

tests=(-m gpu tests/gpu)
[[ $device == cpu ]] && tests+=(--collect-only)
step build 100 bash -c build
step doctor 40 "$PYTHON" tools/doctor.py --device "$device" --kernels native
step tests 170 "$PYTHON" -m pytest "${tests[@]}"
step speed 150 "$PYTHON" tools/benchmark/gpu_check.py --device "$device" ${quick[@]+"${quick[@]}"} --output "$output/speed.json"

echo
sed -n '/^| what /,$p' "$output/speed.log"
echo
echo "${summary}in $output/: the output of each step, and speed.json"
((${#failed[@]} == 0))
