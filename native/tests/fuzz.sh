#!/usr/bin/env bash
# Fuzzes what reads bytes that another process wrote: the ring header, the slot header, the layout of a body, the blocks of
# an arena. Built with AddressSanitizer + UBSan; every fuzz_*.cpp with LLVMFuzzerTestOneInput is a target.
# Usage: native/tests/fuzz.sh DIR [SECONDS]   (600 by default, for all targets together; 0 only replays)
# SEED=n, RUNS=n for a run that can be repeated (then SECONDS only limits), TARGETS="read_table ...",
# PYTHON=interpreter with nanobind (the frame target is left out without it), CXX=clang++ uses libFuzzer,
# KEEP=0 leaves the corpus as it is.
#
# Replays native/tests/corpus/TARGET first. New inputs go to DIR, and those that reach something the
# corpus does not are made small and added to it. Ends with 1 after a crash; the input is in DIR/crashes,
# and `DIR/bin/fuzz_TARGET -runs=0 DIR/crashes` runs it again. One that led to a fix is kept in the
# corpus as regression-WHAT.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
native=$here/..
dir=${1:?usage: fuzz.sh DIR [SECONDS]}
seconds=${2:-600}
seed=${SEED:-1}
corpus=$here/corpus
max_files=90  # of each target; findings, named regression-*, aside
max_length=2048
CXX=${CXX:-g++}
mkdir -p "$dir"/{bin,obj,work,crashes}
dir=$(cd "$dir" && pwd)

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:handle_abort=1:allocator_may_return_null=1:abort_on_error=0}
# UBSan has its own way out of the process; as an abort, AddressSanitizer and then the driver see it too.
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:abort_on_error=1}
fixed=()
setarch "$(uname -m)" -R true 2>/dev/null && fixed=(setarch "$(uname -m)" -R)

common=(-std=c++20 -O1 -g -fno-omit-frame-pointer -fno-pie -DCONVEYOR_DEBUG=1 -I"$native" -I"$here" -pthread)
sanitize=(-fsanitize=address,undefined -fno-sanitize-recover=undefined)
if "$CXX" --version | grep -q clang; then
    covered=(-fsanitize=fuzzer-no-link) engine=(-fsanitize=fuzzer)
else
    covered=(-fsanitize-coverage=trace-pc,trace-cmp) engine=("$dir/obj/fuzz_driver.o")
fi

build() {  # the flags, then OBJECT SOURCE; what has not changed since is left
    local object=${*: -2:1} source=${*: -1}
    [ "$object" -nt "$source" ] && [ -z "$(find "$native" -name '*.h' -newer "$object" -print -quit)" ] && return
    "$CXX" "${@:1:$#-2}" -Wall -Wextra -c "$source" -o "$object" || exit 2
}

python=${PYTHON:-$here/../../.venv/bin/python}
[ -x "$python" ] || python=python3
where=$("$python" - 2>/dev/null <<'END'
import os, sys, sysconfig
import nanobind
v = sysconfig.get_config_var
assert os.path.exists(os.path.join(v("LIBDIR"), v("LDLIBRARY"))) and v("Py_ENABLE_SHARED")
print(v("INCLUDEPY"), os.path.dirname(nanobind.__file__), v("LIBDIR"), v("LDVERSION"), sys.base_prefix)
END
) || where=

targets=()
for target in ${TARGETS:-read_table round_trip block ring frame}; do
    if [ "$target" = frame ] && [ -z "$where" ]; then
        echo "frame: left out, there is no Python with a shared library and nanobind"
        continue
    fi
    targets+=("$target")
done
[ ${#targets[@]} -gt 0 ] || exit 2

echo "== building"
[ "${engine[0]}" = "$dir/obj/fuzz_driver.o" ] && build -std=c++20 -O2 -g -fno-pie "${engine[0]}" "$here/fuzz_driver.cpp"
for target in "${targets[@]}"; do
    sources=() libraries=() flags=("${common[@]}")
    case $target in
    block) sources=(arena/{arena,view,holds,pins,populate} process_table hazards) ;;
    ring) sources=(process_table arena/holds) ;;
    frame)
        read -r include nanobind libdir version home <<<"$where"
        flags+=(-isystem "$include" -isystem "$nanobind/include" -I"$native/python" -DFUZZ_PYTHON_HOME="\"$home\"" -fvisibility=hidden)
        build "${common[@]}" -O2 -w -I"$include" -I"$nanobind/include" -I"$nanobind/ext/robin_map/include" \
            "$dir/obj/nanobind.o" "$nanobind/src/nb_combined.cpp"
        mapfile -t sources < <(cd "$native" && printf '%s\n' *.cpp {arena,collective}/*.cpp python/{hooks,native_values,made_in_place,kept,encode,decode,reader}.cpp | sed 's/\.cpp$//')
        libraries=("$dir/obj/nanobind.o" -L"$libdir" -Wl,-rpath,"$libdir" -l"python$version")
        ;;
    esac
    objects=()
    for source in "${sources[@]}"; do
        object=$dir/obj/$target-${source//\//-}.o
        build "${flags[@]}" "${sanitize[@]}" "${covered[@]}" "$object" "$native/$source.cpp"
        objects+=("$object")
    done
    build "${flags[@]}" "${sanitize[@]}" "${covered[@]}" "$dir/obj/fuzz_$target.o" "$here/fuzz_$target.cpp"
    "$CXX" -no-pie -pthread "${sanitize[@]}" "$dir/obj/fuzz_$target.o" "${objects[@]}" "${engine[@]}" "${libraries[@]}" \
        -o "$dir/bin/fuzz_$target" || exit 2
done

run() {  # TARGET ARGUMENTS...
    local target=$1
    shift
    # Python keeps what it made until the process ends.
    local leaks=1
    [ "$target" = frame ] && leaks=0
    ASAN_OPTIONS=$ASAN_OPTIONS:detect_leaks=$leaks "${fixed[@]}" "$dir/bin/fuzz_$target" -max_len=$max_length \
        -artifact_prefix="$dir/crashes/$target-" "$@"
}

failed=0
for target in "${targets[@]}"; do
    kept=$corpus/$target work=$dir/work/$target
    mkdir -p "$kept" "$work"
    echo "== $target: replay"
    run "$target" -runs=0 "$kept" || { failed=1; continue; }
    [ "$seconds" -gt 0 ] || continue
    share=$((seconds / ${#targets[@]}))
    echo "== $target: $((share > 0 ? share : 1)) s, seed $seed"
    run "$target" -seed="$seed" ${RUNS:+-runs="$RUNS"} -max_total_time=$((share > 0 ? share : 1)) "$work" "$kept" || { failed=1; continue; }
    [ "${KEEP:-1}" = 1 ] || continue
    run "$target" -merge=1 "$kept" "$work" || { failed=1; continue; }
    if [ "$(find "$kept" -type f ! -name 'regression-*' | wc -l)" -gt $max_files ]; then
        # Made anew, from the smallest up: many of the first have been overtaken by later ones.
        fresh=$(mktemp -d "$dir/fresh.XXXX")
        if run "$target" -merge=1 "$fresh" "$kept" "$work"; then
            find "$kept" -type f ! -name 'regression-*' -delete
            cp "$fresh"/* "$kept"/
        else
            failed=1
        fi
    fi
    echo "$target: $(find "$kept" -type f | wc -l) inputs kept, $(cat "$kept"/* | wc -c) bytes"
done
[ $failed -eq 0 ] || echo "fuzz: FAILED, the inputs are in $dir/crashes"
exit $failed
