#!/usr/bin/env bash
# What is measured on a GPU host, section by section; the figures go to docs/measurements.md.
#
#   scripts/gpu_acceptance.sh LOGS [SECTION ...]      default: every section
#
# Each section writes LOGS/SECTION.log and prints its last lines; the exit code is the number of failed sections.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
logs=${1:?usage: scripts/gpu_acceptance.sh LOGS [SECTION ...]}; shift
mkdir -p "$logs"
# workers have temporary folders of their own: FA4's compiled kernels are kept where all of them look
export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 PYTHONUNBUFFERED=1
export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=${FLASH_ATTENTION_CUTE_DSL_CACHE_DIR:-$HOME/.cache/flash_attention_cute_dsl}
mkdir -p "$FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
python=${PYTHON:-python3}
mlacheck() { "$python" -m harness.cli "$@"; }
jobs=${JOBS:-12}
sections=("$@")
[ $# -gt 0 ] || sections=(tests small_triton small_fa4 full_triton full_fa4 tightness sensitivity compiles bench sanitize mutants_fa4 mutants_cuda)
run() { mlacheck run --no-shrink --jobs "$jobs" --out "$logs/run_$1" "${@:2}"; }

section_tests() { "$python" -m pytest -q tests/gpu -p no:cacheprovider; }
section_small_triton() { run small_triton --profile ci --subject 'ours[triton]' --max-examples "${SMALL:-2000}"; }
section_small_fa4() { run small_fa4 --profile ci --subject 'ours[fa4]' --max-examples "${SMALL:-2000}"; }
section_full_triton() { run full_triton --profile gpu_full --subject 'ours[triton]' --max-examples "${FULL:-30}"; }
section_full_fa4() { run full_fa4 --profile gpu_full --subject 'ours[fa4]' --max-examples "${FULL:-30}"; }
section_tightness() { for s in 'ours[triton]' 'ours[fa4]'; do mlacheck measure tightness --subject "$s" || return; done; }
section_sensitivity() { for s in 'ours[triton]' 'ours[fa4]'; do mlacheck measure sensitivity --subject "$s" || return; done; }
section_compiles() { mlacheck bench compiles --attention triton && mlacheck bench compiles --attention fa4; }
section_bench() { mlacheck bench prefill --attention triton --attention fa4; }
section_sanitize() {
  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 \
    "$python" -m harness.bench.sanitize --attention triton --attention fa4
}
section_mutants_fa4() { mlacheck mutants --subject-attention fa4 --jobs "$jobs" --case-timeout 40; }
# what needs compiled kernels and our Triton attention; the rest of that table runs on any CPU
section_mutants_cuda() { mlacheck mutants --only mask_barrier_lost --only attend_tile_list_misses_last --jobs 2; }

failed=0
for section in "${sections[@]}"; do
  began=$SECONDS
  "section_$section" > "$logs/$section.log" 2>&1
  code=$?
  echo "== $section: exit $code, $((SECONDS - began)) s"
  tail -n "${LINES_EACH:-12}" "$logs/$section.log"
  [ $code -eq 0 ] || failed=$((failed + 1))
done
exit $failed
