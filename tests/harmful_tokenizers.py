"""Tokenizer folders that nobody should trust."""

import hashlib
import json
from pathlib import Path

CODE = """\
from pathlib import Path

Path({marker!r}).write_text("ran")
"""


def bring_code(folder: Path, *, marker: Path) -> Path:
    """Let the tokenizer in ``folder`` ask for its own Python class, whose file writes ``marker`` when it runs."""
    settings = folder / "tokenizer_config.json"
    values = json.loads(settings.read_text())
    values["tokenizer_class"] = "Planted"
    values["auto_map"] = {"AutoTokenizer": [None, "planted.Planted"]}
    settings.write_text(json.dumps(values))
    (folder / "planted.py").write_text(CODE.format(marker=str(marker)))
    return marker


def seal(checkpoint: Path) -> None:
    """Write the present size and sha256 of every file, new ones too, into the manifest, as a forger would."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["files"] = {
        path.relative_to(checkpoint).as_posix(): {
            "size": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != "manifest.json"
    }
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


DEEP = "[" * 100_000 + "]" * 100_000
_FAST = '{"tokenizer_class": "PreTrainedTokenizerFast", '
MALFORMED = [
    ("tokenizer_config.json", "{"),
    ("tokenizer_config.json", "[]"),
    ("tokenizer_config.json", "5"),
    ("tokenizer_config.json", DEEP),
    ("tokenizer_config.json", '{"tokenizer_class": 5}'),
    ("tokenizer_config.json", '{"auto_map": null}'),
    ("tokenizer_config.json", '{"fast_tokenizer_files": 3}'),
    ("tokenizer_config.json", '{"tokenizer_class": "GPT2Tokenizer", "eos_token": {"no": "content"}}'),
    ("tokenizer_config.json", _FAST + '"eos_token": ["a"]}'),
    ("tokenizer_config.json", _FAST + '"added_tokens_decoder": [1]}'),
    ("tokenizer_config.json", _FAST + '"model_max_length": "x", "eos_token": 7}'),
    ("tokenizer.json", ""),
    ("tokenizer.json", "[]"),
    ("tokenizer.json", "{}"),
    ("tokenizer.json", DEEP),
    ("tokenizer.json", '{"model": {"type": "BPE", "vocab": [], "merges": 5}}'),
    ("tokenizer.json", "\xff"),
    ("special_tokens_map.json", "[[[]]]"),
    ("added_tokens.json", '"text"'),
    ("config.json", "[1]"),
    ("config.json", '{"model_type": ["gpt2"]}'),
]
"""Files of a tokenizer folder and what somebody may have put into them."""
