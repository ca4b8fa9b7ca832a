#!/usr/bin/env bash
# Builds the native tests with AddressSanitizer + UBSan and with ThreadSanitizer, and runs them all; builds the
# fuzz targets, and replays their corpus.
# Usage: native/tests/run.sh [BUILD_DIR]; FLAVOURS="thread" selects, FILTER=name selects tests,
# TEST_TIMEOUT=seconds limits one program, CONVEYOR_TEST_LIMIT=seconds one test, JOBS=n what is compiled at a time.
# A test that fails is run once more by itself; if it passes then, it is flaky: FLAKY=file gets its name, and it counts
# as passed. What a sanitizer reports, a test that hangs, or one that ends its program, is never run again.
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

# Which tests of a program have failed, by its output: a name stands before what the test says, and its end after it.
# The one that was named last has ended with its program, if there is no end.
names_of_failed() {
    awk 'length($0) > 60 && /^[A-Za-z_][A-Za-z0-9_]* / { name = $1; ended = 0 }
         /FAILED$/ && name != "" && !ended { print name }
         /(ok|FAILED)$/ { ended = 1 }
         / passed, / { closed = 1 }
         END { if (!closed && !ended && name != "") print name " (the program ended in it)" }' <<<"$1"
}

# run_program DIR NAME PAGE FILTER; the page may be empty: the kernel's.
run_program() {
    CONVEYOR_TEST_PAGE_SIZE=$3 timeout -k 10 "$limit" "${fixed[@]}" "$1/bin/$2" ${4:+"$4"} 2>&1
}

passes_again() {
    local output code
    output=$(run_program "$@")
    code=$?
    printf '== once more:\n%s\n' "$output"
    [ "$code" -eq 0 ] && [[ $output == *"$4"* ]]
}

# The tests of one flavour; the last line of the output is "passed failed". What failed is written to $dir.failed, and
# its names to $dir.names.
run_tests() {
    local dir=$1 flavour=$2 passed=0 failed=0 source name names output code why program test again
    for source in "$here"/test_*.cpp "${large_pages[@]/#/$here/large-pages:}"; do
        page=
        case $source in */large-pages:*) source=${source/large-pages:/} page=65536 ;; esac
        [ -e "$source" ] || continue
        name=$(basename "$source" .cpp)
        [[ $flavour/$name == thread/test_interleavings* ]] && continue  # see CMakeLists.txt
        echo "== $name ($flavour${page:+, pages of $page bytes})"
        output=$(run_program "$dir" "$name" "$page" "${FILTER:-}")
        code=$?
        printf '%s\n' "$output"
        # A sanitizer reports after the closing line, so the exit code has the last word.
        [[ $output =~ ([0-9]+)\ passed,\ ([0-9]+)\ failed ]] || BASH_REMATCH=("" 0 0)
        passed=$((passed + BASH_REMATCH[1]))
        failed=$((failed + BASH_REMATCH[2]))
        why=
        if [ "$code" -ne 0 ] && [ "${BASH_REMATCH[2]}" -eq 0 ]; then
            case $code in
            124) why="over $limit s" ;;
            142) why="the test named last hangs" ;;  # SIGALRM: see check.h
            *) why="exit code $code" ;;
            esac
            echo "FAILED: $why"
            failed=$((failed + 1))
        fi
        [ "$code" -ne 0 ] || [ "${BASH_REMATCH[2]}" -ne 0 ] || continue
        program=$name
        name="$name ($flavour${page:+, pages of $page bytes})"
        names=$(names_of_failed "$output" | paste -sd ' ')
        # 1 is what the program itself ends with where checks failed; a sanitizer ends it with another.
        if [ -z "$why" ] && [ "$code" -eq 1 ] && [ -n "$names" ]; then
            again=
            for test in $names; do
                if passes_again "$dir" "$program" "$page" "$test"; then
                    echo "flaky: native $name $test"
                    [ -z "${FLAKY:-}" ] || echo "native $name $test" >>"$FLAKY"
                    passed=$((passed + 1)) failed=$((failed - 1))
                else
                    again+="${again:+ }$test"
                fi
            done
            names=$again
            [ -n "$names" ] || continue
        fi
        printf '== %s failed%s\n%s\n' "$name" "${why:+: $why}" "$output" >>"$dir.failed"
        printf '%s: %s\n' "$name" "$why${why:+${names:+; }}$names" >>"$dir.names"
    done
    echo "$passed $failed"
}

mkdir -p "$build"
# The tests of one flavour run while the next one is compiled.
logs=()
for flavour in ${FLAVOURS:-address,undefined thread}; do
    dir=$build/${flavour//,/-}
    rm -f "$dir.failed" "$dir.names"
    cmake -S "$here" -B "$dir" "${generator[@]}" -DCONVEYOR_SANITIZE="$flavour" >"$dir.log" 2>&1 &&
        cmake --build "$dir" --parallel "${JOBS:-$(nproc)}" >>"$dir.log" 2>&1 ||
        { cat "$dir.log"; wait; echo "native: FAILED, the tests cannot be compiled ($flavour)"; exit 1; }
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
# Said once more, and the names last: of a log that is cut to its end, nothing else may be left.
for log in "${logs[@]}"; do cat "${log%.out}.failed" 2>/dev/null; done
[ "$replayed" -eq 0 ] || { echo "== the fuzz targets, or what they once found, failed"; cat "$build/fuzz.out"; }
for log in "${logs[@]}"; do sed 's/^/FAILED /' "${log%.out}.names" 2>/dev/null; done
[ "$replayed" -eq 0 ] || echo "FAILED the fuzz targets, or what they once found"
echo "native: $passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
