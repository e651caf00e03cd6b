"""The decoder: beside the training model, compiled, in 8 bits, and how long it takes; and what is sampled from it."""

from typing import Any

import pytest
import torch
import transformers
from published import VOCABULARY, random_model, random_prompts
from test_generate import script

from dsgpt.common.errors import UserError
from dsgpt.formats.hugging_face import hugging_face_config, to_hugging_face
from dsgpt.inference import decoder as module
from dsgpt.inference import generation
from dsgpt.inference.commands import Sampling
from dsgpt.inference.decoder import Decoder, _Step, round_to_int8, to_int8
from dsgpt.inference.generation import Chooser, generate, generate_batch, measure_latency, probabilities
from dsgpt.model.config import GPT2Config
from dsgpt.model.gpt2 import GPT2, Block, initialize, random_stream

# The decoding engine gives what the model's whole forward pass gives, and the ids that transformers generates.


MODEL = random_model()
PROMPT = [5, 100, 0, 17, 42]


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("prompt_length", [1, 5, 23, 24])
def test_cached_logits_are_those_of_the_whole_pass(prompt_length, rows):
    """With the plain layers and with those that are packed for several rows."""
    ids = torch.randint(0, VOCABULARY, (rows, 24), generator=torch.Generator().manual_seed(2))
    whole = MODEL(ids)[:, prompt_length - 1 :]
    sequences = Decoder(MODEL, batch_size=rows).begin(ids[:, :prompt_length].tolist(), new_tokens=24 - prompt_length)
    found = [sequences.read_prompts(), *(sequences.append(ids[:, at]) for at in range(prompt_length, 24))]
    assert sequences.length == 24
    torch.testing.assert_close(torch.stack(found, dim=1), whole, atol=1e-5, rtol=1e-5)


@torch.inference_mode()
def test_padding_changes_no_logits():
    """Prompts of 1 to 9 ids together: each row is that of the whole pass over its own ids."""
    prompts = [[7] * length for length in (9, 1, 4)]
    sequences = Decoder(MODEL, batch_size=3).begin(prompts, new_tokens=3)
    rows = [sequences.read_prompts()]
    for following in (11, 12):
        rows.append(sequences.append(torch.full((3,), following)))
    for row, prompt in enumerate(prompts):
        whole = MODEL(torch.tensor([[*prompt, 11, 12]]))[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.stack([logits[row] for logits in rows]), whole, atol=1e-5, rtol=1e-5)


def test_logits_that_are_nan_draw_nothing():
    model = random_model()
    torch.nn.init.constant_(model.ln_f.weight, 3e38)  # finite, but a product with it is not
    for temperature, penalty in ((0.0, 1.0), (0.0, 1.3), (1.0, 1.0), (1.0, 1.3)):
        how = {"sampling": Sampling(temperature=temperature, repetition_penalty=penalty)}
        with pytest.raises(UserError, match="the model's logits are NaN"):
            list(generate_batch(Decoder(model), [PROMPT], new_tokens=2, **how, generators=[random_stream(1, 0)]))


def as_published(model: GPT2, dtype: torch.dtype = torch.float32) -> transformers.GPT2LMHeadModel:
    """The model of transformers with the same weights."""
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**hugging_face_config(model.config, dtype="fp32", end_of_text=None))
    )
    theirs.load_state_dict(dict(to_hugging_face(model.named_parameters(), model.config)), strict=False)
    return theirs.to(dtype).eval()


def batched(decoder: Decoder, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    return [list(ids) for ids in zip(*generate_batch(decoder, prompts, new_tokens=new_tokens), strict=True)]


def test_greedy_ids_are_those_of_transformers():
    """20 prompts of 1 to 40 ids, fp32, alone and in one batch."""
    model, prompts = random_model(64), random_prompts(20, longest=40)
    peer = as_published(model)
    alone, together = Decoder(model), Decoder(model, batch_size=20)
    found = batched(together, prompts, 20)
    for prompt, ids in zip(prompts, found, strict=True):
        theirs = peer.generate(
            torch.tensor([prompt]), attention_mask=torch.ones((1, len(prompt)), dtype=torch.long), max_new_tokens=20,
            do_sample=False, pad_token_id=0, eos_token_id=None,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert list(generate(alone, prompt, new_tokens=20)) == theirs
        assert ids == theirs
    assert len({tuple(ids) for ids in found}) > 10


@pytest.mark.parametrize("instructions", ["of this CPU", "none"])
def test_low_precision_is_that_of_transformers(monkeypatch, instructions):
    """In bf16 both round at other places: logits agree as far as they agree with fp32.

    Without instructions for bf16, the prompts are many rows, which are multiplied in fp32.
    """
    if instructions == "none":
        for question in ("multiplies", "packs"):
            monkeypatch.setattr(module, question, lambda dtype: dtype == torch.float32)
    peer = as_published(random_model(64), torch.bfloat16)
    ids = torch.tensor([PROMPT * 2, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]])
    sequences = Decoder(random_model(64).to(torch.bfloat16), batch_size=2).begin(ids.tolist(), new_tokens=1)
    with torch.inference_mode():
        ours, theirs, exact = sequences.read_prompts(), peer(ids).logits[:, -1].float(), random_model(64)(ids)[:, -1]
    rounding = (theirs - exact).abs().max()
    assert (ours - exact).abs().max() < 2 * rounding
    assert rounding < 0.02 * exact.abs().max()


@pytest.mark.parametrize(("prompt", "new_tokens"), [([], 1), (PROMPT, 20), ([1] * 25, 1)])
def test_more_tokens_than_positions_are_refused(prompt, new_tokens):
    with pytest.raises(ValueError, match="do not fit into 24 positions"):
        list(generate(Decoder(MODEL), prompt, new_tokens=new_tokens))


# The step for the compiler gives the logits of the other one, compiled or not, and is what `--compile` asks for.


@torch.inference_mode()
@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.long)])
def test_logits_are_those_without_a_compiler(monkeypatch, compiles):
    """Prompts of mixed length, so that padding matters, and two steps, so that the second reads the first one's keys.

    With weights in 8 bits, whose products the compiler replaces. In bf16 it rounds at other places.
    """
    if not compiles:
        monkeypatch.setattr(module, "compiled_step", _Step)
    model = GPT2(config := GPT2Config(n_layer=1, n_head=2, n_embd=32, block_size=24, vocab_size=VOCABULARY))
    initialize(model, config=config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    model, found = model.to(torch.bfloat16).eval(), []
    for compiled in (False, True):
        decoder = Decoder(model, batch_size=2, quantize="int8", compiled=compiled)
        sequences = decoder.begin([[5, 9, 3, 77], [8]], new_tokens=3)
        sequences.read_prompts()
        found.append(torch.stack([sequences.append(torch.tensor(ids)) for ids in ([4, 60], [99, 1])]))
    assert (found[1] - found[0]).abs().max() < 0.03 * found[0].abs().max()
    assert (found[0][0] - found[0][1]).abs().max() > 0.5 * found[0].abs().max()


def test_the_command_compiles_and_quantizes_when_it_is_told_to(checkpoint_with_tokenizer, monkeypatch):
    """The decoder is noted and built without the compiler, which takes half a minute."""
    made, words = [], ["--checkpoint", checkpoint_with_tokenizer, "--prompt", "ab", "--max_new_tokens", 3]

    def noted(model: GPT2, **options: Any) -> Decoder:
        made.append(options)
        return Decoder(model, **options | {"compiled": False})

    monkeypatch.setattr(generation, "Decoder", noted)
    monkeypatch.setenv("CXX", "a compiler that nobody calls")
    for flags in ([], ["--precision", "bf16", "--quantize", "int8", "--compile", "--num_samples", 2]):
        code, _, err = script(*words, *flags)
        assert code == 0, err
    assert made == [
        {"batch_size": 1, "quantize": "none", "compiled": False},
        {"batch_size": 2, "quantize": "int8", "compiled": True},
    ]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert script(*words, "--compile")[2] == "error: --compile needs a C++ compiler: install g++, or leave it out\n"


# Weights in 8 bits: how far they are off, and that evaluation predicts with the weights that generation has.


def test_no_weight_is_off_by_more_than_half_a_step():
    """A step is a 127th of the largest weight of the same output; an output without weights stays one."""
    sizes = torch.tensor([1, 1e-3, 100, 1, 0])[:, None]
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * sizes
    values, scales = to_int8(weight)
    assert (values.dtype, values.abs().amax(dim=1).tolist()) == (torch.int8, [127, 127, 127, 127, 0])
    steps = weight.abs().amax(dim=1, keepdim=True) / 127
    assert ((values * scales[:, None] - weight).abs() <= steps / 2 * 1.0001).all()


def without_biases() -> GPT2:
    """In bf16; a bias would round the products a second time."""
    model = random_model().to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.zero_()
    return model


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("engine", ["decoder", "compiled step"])
def test_every_weight_of_the_head_and_of_the_layers_is_the_rounded_one(engine, rows):
    """So evaluation has the weights of generation; bounds on logits would not see one layer that is not rounded.

    Exactly: products with rows of the identity, few or many at a time, are the weights that the engine reads.
    """
    model, rounded = without_biases(), without_biases()
    round_to_int8(rounded)
    assert torch.equal(rounded.wte.weight, model.wte.weight)  # the embedding of ids is not rounded
    assert not torch.equal(rounded.lm_head.weight, model.lm_head.weight)
    step = _Step(model, quantize="int8") if engine == "compiled step" else Decoder(model, quantize="int8")
    blocks = [block for block in rounded.blocks if isinstance(block, Block)]
    pairs = [(step.head, rounded.lm_head.weight[: rounded.config.vocab_size])]
    for layer, block in zip(step.layers, blocks, strict=True):
        linears = block.attn.qkv, block.attn.proj, block.mlp.fc, block.mlp.proj
        pairs += zip((layer.qkv, layer.proj, layer.fc, layer.out), (each.weight for each in linears), strict=True)
    assert len(pairs) == 1 + 4 * len(blocks)
    for layer_linear, weight in pairs:
        product = layer_linear if engine == "compiled step" else layer_linear.product
        identity = torch.eye(weight.shape[1], dtype=torch.bfloat16).split(rows)
        assert torch.equal(torch.cat([product(part) for part in identity]).T, weight)


# How the time of generation is measured at the end of a run.


@pytest.mark.parametrize(("positions", "prompt_tokens", "new_tokens"), [(2, 1, 1), (24, 12, 12), (200, 16, 100)])
def test_latency_counts_what_it_generated(positions, prompt_tokens, new_tokens):
    found = measure_latency(random_model(positions), torch.arange(64) % VOCABULARY)
    assert (found["prompt_tokens"], found["new_tokens"]) == (prompt_tokens, new_tokens)
    assert 0 < found["latency_min_sec"] <= found["latency_sec"] <= found["latency_max_sec"]
    assert found["tokens_per_sec"] == pytest.approx(new_tokens / found["latency_sec"])
    assert measure_latency(random_model(1), torch.arange(64)) is None  # no position after a prompt


@pytest.mark.parametrize(
    ("first_sec", "token_sec", "new_tokens", "repetitions"),
    [(0.0, 0.001, 100, 15), (3.0, 0.005, 100, 13), (0.0, 0.03, 100, 2), (0.0, 0.2, 44, 1), (0.0, 30.0, 1, 1)],
)
def test_slow_models_repeat_less_and_generate_fewer_tokens(monkeypatch, first_sec, token_sec, new_tokens, repetitions):
    """``first_sec``: of the very first token, which loads kernels; it says nothing about the others."""
    now, first = [0.0], [first_sec]

    def slowly(_model, _prompt, *, new_tokens):
        for _ in range(new_tokens):
            now[0] += token_sec + first[0]
            first[0] = 0.0
            yield 0

    monkeypatch.setattr(generation, "generate", slowly)
    monkeypatch.setattr(generation.time, "perf_counter", lambda: now[0])
    found = measure_latency(random_model(200), torch.arange(64) % VOCABULARY)
    assert (found["new_tokens"], found["repetitions"]) == (new_tokens, repetitions)
    assert found["latency_sec"] == pytest.approx(new_tokens * token_sec)
    assert now[0] <= max(generation.TOTAL_SEC, 3 * token_sec)


# Sampling draws from the distribution that transformers defines, with a random stream for every text.

SETTINGS = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.3, "top_p": 0.6},
    {"temperature": 1.0, "min_p": 0.02},
    {"temperature": 2.0, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1e-40},
]


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(5)) * 3


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_distribution_is_that_of_transformers(settings):
    warpers = {
        "temperature": transformers.TemperatureLogitsWarper,
        "top_k": transformers.TopKLogitsWarper,
        "top_p": transformers.TopPLogitsWarper,
        "min_p": transformers.MinPLogitsWarper,
    }
    logits = random_logits(50)
    expected = logits.double()
    for name, value in settings.items():
        expected = warpers[name](value)(None, expected)
    found = probabilities(logits, Sampling(**settings))
    torch.testing.assert_close(found.double(), expected.softmax(dim=1), atol=1e-6, rtol=1e-4)


def test_repetitions_are_penalized_as_in_transformers():
    """Ids of the prompt and of the text so far, the latter after they were chosen."""
    prompts = [[1, 2, 3], [9]]
    chooser = Chooser(Sampling(repetition_penalty=1.5), prompts=prompts)
    logits, texts = random_logits(2), [list(prompt) for prompt in prompts]
    logits[1] -= 12  # all of them negative
    for _ in range(20):
        expected = [
            int(transformers.RepetitionPenaltyLogitsProcessor(1.5)(torch.tensor([text]), row[None]).argmax())
            for text, row in zip(texts, logits, strict=True)
        ]
        found = chooser.choose(logits).tolist()
        assert found == expected
        for text, following in zip(texts, found, strict=True):
            text.append(following)
    assert len(set(texts[0])) > 6


@pytest.mark.parametrize("settings", SETTINGS[:5], ids=str)
def test_draws_follow_the_distribution(settings):
    """Chi-square over 20,000 draws, ids of fewer than 5 expected draws as one.

    The bound is the mean plus 5 standard deviations: a temperature that is 10% off exceeds it. Ids of probability 0
    are never drawn.
    """
    count = 20_000
    expected = probabilities(random_logits(1), Sampling(**settings))[0].double() * count
    streams = [random_stream(1, number) for number in range(count)]
    chooser = Chooser(Sampling(**settings), prompts=[[0]] * count, generators=streams)
    found = torch.bincount(chooser.choose(random_logits(1).expand(count, -1)), minlength=VOCABULARY).double()
    assert found[expected == 0].sum() == 0
    often = expected >= 5
    pairs = [*zip(found[often], expected[often], strict=True)]
    if expected[~often].sum() > 5:
        pairs.append((found[~often].sum(), expected[~often].sum()))
    statistic = sum((f - e) ** 2 / e for f, e in pairs)
    freedom = len(pairs) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_padded_ids_are_never_sampled():
    model = random_model()
    with torch.no_grad():
        model.wte.weight[VOCABULARY:] = model.wte.weight[3] * 100
    steps = generate_batch(
        Decoder(model), [[5]], new_tokens=19, sampling=Sampling(temperature=50.0), generators=[random_stream(0, 0)]
    )
    ids = [following for (following,) in steps]
    assert max(ids) < VOCABULARY
    assert len(set(ids)) > 5  # nearly uniform at this temperature
