#!/usr/bin/env bash
# Runs tests with the lowest versions that pyproject.toml allows, in .venv-floor. TORCH names
# another version of PyTorch, as older ones come with gigabytes of CUDA.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

BIN=.venv-floor/bin
TESTED=(
    tests/architectures tests/engine/models/test_experts.py tests/engine/parallel/test_equality.py
    tests/integration/test_streams.py tests/kernels/test_triton_compiled.py
)
TOOLS=(cffi cryptography execnet h2 hpack hyperframe hypothesis iniconfig pluggy pycparser pytest
    pytest-asyncio pytest-timeout pytest-xdist sortedcontainers)

.venv/bin/python -m pip install --quiet uv
.venv/bin/uv pip compile pyproject.toml --quiet --resolution lowest-direct --python-version 3.11 \
    --extra engine --extra router --no-annotate --override <(echo "${TORCH:-torch==2.11.0}") \
    --output-file .venv-floor.txt
.venv/bin/python -m venv --clear .venv-floor
if [ -n "${TORCH:-}" ]; then # without the packages of the CUDA build that uv chose
    sed -i '/^\(torch\|nvidia\|cuda\|triton\)/d' .venv-floor.txt
    $BIN/pip install --quiet "$TORCH"
fi
$BIN/pip install --quiet --no-deps --requirement .venv-floor.txt triton==3.6.0
for tool in "${TOOLS[@]}"; do
    grep -i "^$tool==" constraints.txt | cut -d' ' -f1
done | $BIN/pip install --quiet --no-deps --requirement /dev/stdin
pwd > "$($BIN/python -c 'import site; print(site.getsitepackages()[0])')/octavo.pth"
$BIN/python -m pytest --numprocesses 2 -p no:cacheprovider "${@:-${TESTED[@]}}"
