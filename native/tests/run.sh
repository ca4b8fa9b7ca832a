#!/usr/bin/env bash
# Builds the native tests with AddressSanitizer + UBSan and with ThreadSanitizer, and runs them all; builds the
# fuzz targets, and replays their corpus.
# Usage: native/tests/run.sh [BUILD_DIR]; FLAVOURS="thread" selects, FILTER=name selects tests,
# TEST_TIMEOUT=seconds limits one program, CONVEYOR_TEST_LIMIT=seconds one test, JOBS=n what is compiled at a time.
set -uo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
build=${1:-$here/../../build/native-tests}
limit=${TEST_TIMEOUT:-120}
generator=()
command -v ninja >/dev/null && generator=(-G Ninja)

# Sanitizers want their shadow memory where randomized addresses may already lie.
fixed=()
setarch "$(uname -m)" -R true 2>/dev/null && fixed=(setarch "$(uname -m)" -R)

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1:strict_init_order=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1:halt_on_error=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-second_deadlock_stack=1:die_after_fork=0}

# These run once more as if the kernel had pages of 64 KiB.
large_pages=(test_arena.cpp test_arena_forks.cpp test_broken_rings.cpp test_leases.cpp test_populate.cpp test_recorder.cpp test_ring.cpp test_ring_blocks.cpp
             test_ring_ends.cpp test_session_memory.cpp)

# The tests of one flavour; the last line of the output is "passed failed".
run_tests() {
    local dir=$1 flavour=$2 passed=0 failed=0 source name output code
    for source in "$here"/test_*.cpp "${large_pages[@]/#/$here/large-pages:}"; do
        page=
        case $source in */large-pages:*) source=${source/large-pages:/} page=65536 ;; esac
        [ -e "$source" ] || continue
        name=$(basename "$source" .cpp)
        [[ $flavour/$name == thread/test_interleavings* ]] && continue  # see CMakeLists.txt
        echo "== $name ($flavour${page:+, pages of $page bytes})"
        output=$(CONVEYOR_TEST_PAGE_SIZE=$page timeout -k 10 "$limit" "${fixed[@]}" "$dir/bin/$name" ${FILTER:+"$FILTER"} 2>&1)
        code=$?
        printf '%s\n' "$output"
        # A sanitizer reports after the closing line, so the exit code has the last word.
        [[ $output =~ ([0-9]+)\ passed,\ ([0-9]+)\ failed ]] || BASH_REMATCH=("" 0 0)
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        if [ "$code" -ne 0 ] && [ "${BASH_REMATCH[2]}" -eq 0 ]; then
            case $code in
            124) echo "FAILED: over $limit s" ;;
            142) echo "FAILED: the test named last hangs" ;;  # SIGALRM: see check.h
            *) echo "FAILED: exit code $code" ;;
            esac
            failed=$((failed + 1))
            BASH_REMATCH[2]=1
        fi
        # Said once more at the end: of a log that is cut there, nothing else may be left.
        [ "${BASH_REMATCH[2]}" -eq 0 ] || printf '== %s (%s) failed\n%s\n' "$name" "$flavour${page:+, pages of $page bytes}" "$output" >>"$dir.failed"
    done
    echo "$passed $failed"
}

mkdir -p "$build"
# The tests of one flavour run while the next one is compiled.
logs=()
for flavour in ${FLAVOURS:-address,undefined thread}; do
    dir=$build/${flavour//,/-}
    rm -f "$dir.failed"
    cmake -S "$here" -B "$dir" "${generator[@]}" -DCONVEYOR_SANITIZE="$flavour" >"$dir.log" 2>&1 &&
        cmake --build "$dir" --parallel "${JOBS:-$(nproc)}" >>"$dir.log" 2>&1 ||
        { cat "$dir.log"; wait; exit 1; }
    grep -E 'warning:' "$dir.log"
    run_tests "$dir" "$flavour" >"$dir.out" 2>&1 &
    logs+=("$dir.out")
done
# The fuzz targets, too, and what they once found.
replayed=0
[ -n "${FILTER:-}" ] || KEEP=0 "$here/fuzz.sh" "$build/fuzz" 0 >"$build/fuzz.out" 2>&1 || replayed=1
wait
passed=0 failed=0
for log in "${logs[@]}"; do
    head -n -1 "$log"
    read -r some broken < <(tail -n 1 "$log")
    passed=$((passed + some))
    failed=$((failed + broken))
done
failed=$((failed + replayed))
cat "$build"/*.failed 2>/dev/null
[ "$replayed" -eq 0 ] || { echo "== the fuzz targets, or what they once found, failed"; cat "$build/fuzz.out"; }
echo "native: $passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
