#!/bin/sh
# Collect what a GPU machine without network lacks: wheels for Linux on x86-64, a text and its tokenizer. Torch is not
# among them: a GPU image has it, with its CUDA. Here, in the clone, with network and after `make install`:
#
#   launch/gpu_wheels.sh gpu-machine
#
# Then copy the clone with this folder to the machine, and in the clone there:
#
#   python3 -m pip install --no-index --no-deps gpu-machine/wheels/*.whl
#   export PYTHONPATH=$PWD/src
#   python3 src/benchmark.py gpu
#
#   VERSION   of that machine's Python; default: 3.11
#   MOST_MB   the most megabytes that the folder may have; default: 64
set -eu
into=${1:?usage: launch/gpu_wheels.sh DIR} version=${VERSION:-3.11} most=${MOST_MB:-64}
here=$(cd "${0%/*}/.." && pwd)
python=$here/.venv/bin/python
[ -x "$python" ] || { echo "error: $python: there is none: call make install first" >&2; exit 2; }
mkdir -p "$into/wheels"

# What the proof imports, and what that needs, in the versions of this environment. Charts and data sets need more.
pins=$("$python" - <<'END'
import sys
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement

WANTED = ["deepspeed", "transformers", "safetensors", "nvidia-ml-py", "pyyaml", "fsspec", "ninja"]
SERVER = ["starlette", "uvicorn", "prometheus-client", "httpx2", "h11"]
pins, left = {"torch": ""}, [*WANTED, *SERVER]
while left:
    name = left.pop().lower().replace("_", "-")
    if name in pins:
        continue
    try:
        pins[name] = f"{name}=={version(name)}"
    except PackageNotFoundError:
        sys.exit(f"error: {name} is not installed here: {'pip install .[serve]' if name in SERVER else 'make install'}")
    needed = map(Requirement, requires(name) or [])
    left += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
print(*filter(None, pins.values()))
END
)

# DeepSpeed has no wheel. Built without its operators it is pure Python; the machine compiles those that it uses.
others=
for pin in $pins; do
  case $pin in deepspeed==*) deepspeed=$pin ;; *) others="$others $pin" ;; esac
done
DS_BUILD_OPS=0 "$python" -m pip wheel --quiet --no-deps --wheel-dir "$into/wheels" "$deepspeed"
# shellcheck disable=SC2086 # each word is a package
"$python" -m pip download --quiet --no-deps --only-binary=:all: --implementation cp --python-version "$version" \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
  --dest "$into/wheels" $others

# The text of `make demo`, and a tokenizer trained on it.
"$python" "$here/data_prep/preprocess.py" --output_dir "$into/text"

size=$(du --summarize --block-size=1M "$into" | cut -f1)
echo "$into: $size MB, $(find "$into/wheels" -name '*.whl' | wc -l) wheels for Python $version"
[ "$size" -le "$most" ] || { echo "error: $into has more than $most MB (MOST_MB)" >&2; exit 2; }
