"""What others write: weights equal those of Hugging Face, and tokenizers are only data."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from harmful_tokenizers import bring_code
from published import drawn
from small_run import VOCABULARY, write_tokenizer
from transformers import GPT2Config as HuggingFaceConfig
from transformers import GPT2LMHeadModel

from dsgpt.common.errors import UserError
from dsgpt.formats.hugging_face import to_hugging_face
from dsgpt.formats.tokenizer_files import fault_of, open_tokenizer
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2

# With the same weights the model is transformers' GPT-2: logits, loss and the gradient of every parameter.


SHAPES = [
    {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 24, "vocab_size": 101},
    {"n_layer": 3, "n_head": 1, "n_embd": 8, "block_size": 7, "vocab_size": 128},
    {"n_layer": 1, "n_head": 3, "n_embd": 12, "block_size": 1, "vocab_size": 63},
]


def pair(shape: dict[str, int]) -> tuple[GPT2, GPT2LMHeadModel]:
    """Our model, every parameter random (biases and LayerNorms too), and theirs with the same values."""
    config = GPT2Config(**shape)
    ours: GPT2 = drawn(GPT2(config))
    dropouts = {f"{part}_pdrop": 0.0 for part in ("resid", "embd", "attn")}
    sizes = {("n_positions" if name == "block_size" else name): size for name, size in shape.items()}
    theirs = GPT2LMHeadModel(HuggingFaceConfig(**sizes, **dropouts, attn_implementation="eager")).train()
    mapped = {name: value.detach() for name, value in to_hugging_face(ours.named_parameters(), config)}
    outcome = theirs.load_state_dict(mapped, strict=False)
    assert outcome.unexpected_keys == []
    assert outcome.missing_keys in ([], ["lm_head.weight"])  # tied to wte
    return ours.train(), theirs


def batch(shape: dict[str, int], *, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, shape["vocab_size"], (3, length + 1), generator=torch.Generator().manual_seed(1))
    ids[0, 0], ids[-1, -1] = shape["vocab_size"] - 1, shape["vocab_size"] - 1  # the last real id, read and predicted
    return ids[:, :-1], ids[:, 1:]


@pytest.mark.parametrize(("shape", "length"), [*((SHAPES[0], n) for n in (1, 5, 24)), (SHAPES[1], 7), (SHAPES[2], 1)])
def test_logits_loss_and_every_gradient(shape, length):
    ours, theirs = pair(shape)
    inputs, targets = batch(shape, length=length)
    logits, expected = ours(inputs), theirs(inputs).logits
    assert logits.shape == expected.shape == (3, length, shape["vocab_size"])
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)

    loss = ours(inputs, targets)
    expected_loss = torch.nn.functional.cross_entropy(expected.flatten(0, 1), targets.flatten())
    torch.testing.assert_close(loss, expected_loss, atol=1e-5, rtol=0)
    if length > 1:  # transformers' own loss
        shifted = ours(inputs[:, :-1], inputs[:, 1:])
        torch.testing.assert_close(shifted, theirs(inputs, labels=inputs).loss, atol=1e-5, rtol=0)
    loss.backward()
    expected_loss.backward()
    gradients = dict(to_hugging_face(((name, p.grad) for name, p in ours.named_parameters()), ours.config))
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert set(gradients) == set(wanted)
    for name, gradient in wanted.items():
        assert gradient.abs().max() > 0 or length == 1, name
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


# Opening a tokenizer reads regular files of known names in its folder, whatever its settings name.


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path / "mine")
    return tmp_path / "mine"


def set_keys(file: Path, **values: object) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(old | values))


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        open_tokenizer(folder, what="here")
    (line,) = caught.value.problems
    assert line == f"here: {fault_of(folder)}", "training and converting call fault_of alone: they would accept it"
    return line


@pytest.mark.parametrize(
    ("file", "key", "value", "named"),
    [
        *(("special_tokens_map", key, "/gone/a.json", key) for key in ("tokenizer_file", "vocab_file", "vocab")),
        *(("tokenizer_config", key, "/gone/a.json", key) for key in ("vocab_file", "vocab", "merges", "gguf_file")),
        ("tokenizer_config", "fast_tokenizer_files", ["tokenizer.json", "/gone/a.json"], "fast_tokenizer_files"),
        ("tokenizer_config", "init_inputs", ["/gone/a.json"], "init_inputs"),
        ("tokenizer_config", "sp_model_kwargs", {"model_file": "/gone/a.json"}, "model_file"),
        ("config", "configuration_files", ["config.4.0.0.json"], "configuration_files"),
    ],
)
def test_a_file_that_an_entry_names_is_refused(folder, file, key, value, named):
    set_keys(folder / f"{file}.json", **{key: value})
    shutil.copy(folder / f"{file}.json", folder / f"{file}.4.0.0.json")
    assert f"its {file}.json names other files to open ({named})" in refusal(folder)


@pytest.mark.parametrize("kind", ["AutoConfig", "AutoTokenizer"])
def test_code_that_a_configuration_beside_asks_for_is_refused(folder, tmp_path, kind):
    marker = bring_code(folder, marker=tmp_path / "ran")
    set_keys(folder / "tokenizer_config.json", auto_map=None)
    set_keys(folder / "config.json", model_type="planted", auto_map={kind: "planted.Planted"})
    assert "its config.json asks for its own code (auto_map)" in refusal(folder)
    assert not marker.exists()


def test_entries_that_the_library_writes_or_ignores_are_allowed(folder):
    """Settings of earlier versions contain paths of the author's machine, which the library does not open."""
    set_keys(
        folder / "tokenizer_config.json",
        **{"tokenizer_file": "/gone/a.json", "special_tokens_map_file": "/gone/b.json", "vocab_file": None},
        init_inputs=[],
    )
    tokenizer = open_tokenizer(folder, what="here")
    assert len(tokenizer) == VOCABULARY and tokenizer.name_or_path == str(folder)


def test_files_of_unknown_names_are_not_opened(folder, tmp_path):
    """The library looks for templates in a subfolder, and would follow links there."""
    secret = tmp_path / "secret"
    secret.write_text("of somebody else")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "mine.jinja").symlink_to(secret)
    assert not open_tokenizer(folder, what="here").chat_template
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"^here: is not a readable tokenizer folder") as caught:
        open_tokenizer(folder, what="here")
    assert "/tokenizer-" not in str(caught.value), "it names the copy"
