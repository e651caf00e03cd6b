"""``benchmark.py oracles``: the baseline beside programs that are not ours, from the same weights on the same batches.

The baseline is started as users start it; its first weights are exported by ``src/convert.py``'s export. The others
read these weights and the same windows, which are cut from the token file here, not by the loader. ``python -m
dsgpt.benchmarks.oracles JOB`` is one of the others in a process of its own.

How far fp32 lets equal programs go apart is measured, too: the same training in float64 is the reference of all.
"""

import importlib.util
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsgpt.benchmarks import cells, frame
from dsgpt.benchmarks.launch import LineWorker, train, training_words
from dsgpt.common.command_line import POSITIVE, flag
from dsgpt.common.errors import UserError
from dsgpt.common.files import write_json_atomic
from dsgpt.common.json_files import read_object
from dsgpt.record.provenance import git_commit
from dsgpt.record.schema import STEPS_FILE, read_steps

MODULE = "dsgpt.benchmarks.oracles"
EXACT_ALL = "transformers, float64, decay of all"
"""Trainer's reference. It gives DeepSpeed all parameters in one group, so the recipe's optimizer decays them all."""
EXACT, OURS, TRANSFORMERS = "transformers, float64", "dsgpt, baseline", "transformers, torch's AdamW"
TRAINER, NANOGPT, ERF = "transformers' Trainer, DeepSpeed ZeRO-2", "nanoGPT, GELU by tanh", "nanoGPT, GELU by erf"
RECIPE = "ds_configs/zero2.json"
STEPS, LENGTH = 100, 32
SHAPE = {"num_layers": 2, "num_heads": 2, "embedding_size": 64, "max_position_embeddings": LENGTH + 1}
"""One position more than the windows have: transformers gets a window with its last target, and shifts it itself."""
FACTS = {"loss": "loss, nats", "grad_norm": "gradient norm, relative", "lr": "rate, relative", "weights": "weights"}
BOUNDS = {"loss": 3e-6, "grad_norm": 3e-6, "lr": 1e-12, "weights": 3e-6}
"""Of the distance to float64: absolute of the loss; relative of the others, of the weights as 2-norms, each of them.
About three times what transformers has in fp32: no program in fp32 can promise less."""
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""Weights that transformers stores as (inputs, outputs), and nanoGPT as (outputs, inputs)."""

Result = dict[str, Any]
Curve = list[dict[str, float]]
"""Loss, norm of the gradient before it is clipped, and the rate that the optimizer used, of every step."""


def oracles_page(record: frame.Record, *, source: str) -> str:
    """The page; ``source`` is the record's path, for the reader."""
    head = frame.filled("oracles", record, record_at=source, recipe=RECIPE, erf=ERF, exact=EXACT)
    words = {"failed": "not equal", "not run": "not run", "error": "error"}
    return frame.page_of(head, _table(record), frame.troubles(record["programs"], words))


def summary_lines(record: frame.Record) -> list[str]:
    """The table, for a console."""
    return _table(record).removeprefix("## ").splitlines()


def _table(record: frame.Record) -> str:
    rows = []
    for one in record["programs"]:
        figures = [f"{one['distance'][fact]:.1e}" if one.get("distance") else "-" for fact in FACTS]
        rows.append([one["name"], *figures, {"passed": "yes", "failed": "**no**"}.get(one["status"], one["status"])])
    allowed = ["allowed", *(f"{bound:.0e}" for bound in record["bounds"].values()), ""]
    return frame.section("Distance to float64", ["program", *FACTS.values(), "as expected"], [*rows, allowed])


@dataclass(frozen=True, kw_only=True)
class OraclesOptions(frame.SuiteOptions):
    """The command line."""

    steps: int = flag(POSITIVE, "N", "optimizer steps of every training (default: %(default)s)", default=STEPS)
    peer: tuple[str, ...] = frame.peers_flag("checkouts to compare with")


class Oracles(frame.Suite[OraclesOptions, Result]):
    """Trains the same model with programs of others.

    oracles: train one small model with this program's baseline, with transformers and torch's AdamW, with transformers'
    Trainer and DeepSpeed, and with nanoGPT, and compare every step with a training in float64. Exit code 0: all are
    equal, and the nanoGPT with another GELU is not; 1: otherwise.

    Examples:
      git clone https://github.com/karpathy/nanoGPT /tmp/nanoGPT
      .venv/bin/python src/benchmark.py oracles --peer nanogpt=/tmp/nanoGPT
    """

    name, record_of, unit = "oracles", "outside oracles", "program"
    flags, page, summary = OraclesOptions, staticmethod(oracles_page), staticmethod(summary_lines)

    def plan(self) -> int:
        self._peers = frame.read_peers(self.options.peer)
        return 6

    def begin(self) -> None:
        import numpy as np  # noqa: PLC0415 - takes its time

        from dsgpt.data.order import SampleOrder, window_count  # noqa: PLC0415
        from dsgpt.data.token_file import open_token_file  # noqa: PLC0415

        corpus, steps = cells.prepare_corpus(self.repository, self.folder / "corpus"), self.options.steps
        recipe = json.loads((self.repository / RECIPE).read_text(encoding="utf-8"))
        # transformers does not fill in what a recipe leaves out
        recipe["scheduler"]["params"]["total_num_steps"] = steps
        self._recipe, self._seed = self.folder / "recipe.json", 1337
        write_json_atomic(self._recipe, recipe)
        self._values = cells.file_values(corpus, recipe=self._recipe, run_dir=Path()) | SHAPE
        self._values |= {"seq_length": LENGTH, "dropout": 0, "device": "cpu", "precision": "fp32"}
        self._values |= {"run_type": "baseline", "seed": self._seed, "max_val_steps": 1, "no_inference": True}
        ids, batch = open_token_file(corpus.train).memmap(), recipe["train_batch_size"]
        order = SampleOrder(windows=window_count(len(ids), LENGTH), global_batch_size=batch, seed=self._seed)
        windows = order.batches(0, steps)[..., None] * LENGTH + np.arange(LENGTH + 1)  # (steps, B, T + 1)
        np.save(self.folder / "batches.npy", ids[windows].astype(np.int64))

    def results(self) -> Iterator[Result]:
        # Under the recipe's schedule the rate of the first step is 0: what it leaves are the first weights.
        self._own("first", steps=1)
        exact = self._other(EXACT)
        yield {"name": EXACT, "status": "passed", "last_loss": exact[0][-1]["loss"]}
        for name in (OURS, TRANSFORMERS, TRAINER, NANOGPT, ERF):
            try:
                curve, weights = self._own("ours", steps=self.options.steps) if name == OURS else self._other(name)
            except UserError as error:
                missing = str(error).startswith("without ")
                yield {"name": name, "status": "not run" if missing else "error", "message": str(error)}
                continue
            found = distances(curve, weights, *(self._other(EXACT_ALL) if name == TRAINER else exact))
            beyond = [f"{FACTS[fact]}: {one:.1e}" for fact, one in found.items() if not one <= BOUNDS[fact]]
            equal, last = not beyond, {"distance": found, "last_loss": curve[-1]["loss"]}
            message = ", ".join(beyond) or ("equal, although its GELU is another" if name == ERF else "")
            yield {"name": name, "status": "passed" if equal is (name != ERF) else "failed", "message": message, **last}

    def _own(self, name: str, *, steps: int) -> tuple[Curve, Path]:
        """Train the baseline and export its last weights."""
        from dsgpt.inference.model_files import export  # noqa: PLC0415 - torch takes seconds

        run, out = self.folder / name, self.folder / f"{name}-weights"
        train(self._values | {"checkpoint_path": run, "max_train_steps": steps}, repository=self.repository, what=name)
        export(run, out, form="hf", dtype="fp32", which="latest", console=self.console)
        lines = [line for line in read_steps(run / STEPS_FILE) if "loss" in line]
        return [{fact: line[fact] for fact in ("loss", "grad_norm", "lr")} for line in lines], out / "model.safetensors"

    def _other(self, name: str) -> tuple[Curve, Path]:
        """Train another program in its process.

        Raises:
            UserError: what it needs is not there, or it failed.
        """
        peer, folder = self._peers.get(frame.NANOGPT), self.folder / name.replace(" ", "-").replace("'", "")
        if name in {NANOGPT, ERF} and not peer:
            raise UserError(f"without --peer {frame.NANOGPT}=FOLDER")
        if name == TRAINER and importlib.util.find_spec("accelerate") is None:
            raise UserError("without accelerate, which transformers' Trainer needs: pip install 'dsgpt[oracles]'")
        job = {"name": name, "recipe": str(self._recipe), "peer": peer and str(peer), "into": str(folder / "weights")}
        job |= {"first": str(self.folder / "first-weights"), "batches": str(self.folder / "batches.npy")}
        rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
        variables = {**(rank if name == TRAINER else {}), "DS_ACCELERATOR": "cpu"}
        with LineWorker(MODULE, job, folder, threads=1, variables=variables) as worker:
            return worker.read()["curve"], folder / "weights"

    def line(self, result: Result, *, count: str, left: str) -> str:
        return f"{count} {result['name']}: {result['status']} {result.get('message', '')}{left}"

    def record(self, results: Sequence[Result]) -> frame.Record:
        commits = {name: git_commit(folder, mark="") for name, folder in self._peers.items()}
        work = {"steps": self.options.steps, "seq_len": LENGTH, "model": SHAPE, "flags": training_words(SHAPE)}
        return {"peers": commits, "work": work, "bounds": BOUNDS, "programs": list(results)}

    def failures(self, record: frame.Record) -> list[str]:
        return [one["name"] for one in record["programs"] if one["status"] not in {"passed", "not run"}]


def distances(curve: Curve, weights: Path, exact: Curve, exact_weights: Path) -> dict[str, float]:
    """The largest distance of each of ``FACTS`` from the training in float64.

    The bias of the keys is left out: softmax does not depend on it, so its gradient is nothing but rounding, which Adam
    makes a step of.
    """
    from safetensors.torch import load_file  # noqa: PLC0415 - as above
    from torch.linalg import vector_norm  # noqa: PLC0415

    if len(curve) != len(exact):
        raise UserError(f"it took {len(curve)} steps instead of {len(exact)}")
    found = {"loss": max(abs(one["loss"] - other["loss"]) for one, other in zip(curve, exact, strict=True))}
    for fact in ("grad_norm", "lr"):
        pairs = [(one[fact], other[fact]) for one, other in zip(curve, exact, strict=True)]
        found[fact] = max(abs(one - other) / (abs(other) or 1.0) for one, other in pairs)
    ours, theirs = ({_bare(name): value for name, value in load_file(one).items()} for one in (weights, exact_weights))
    ours.setdefault("lm_head.weight", ours["wte.weight"])
    for own in (ours, theirs):
        for name in [name for name in own if name.endswith("c_attn.bias")]:
            queries, _, values = own.pop(name).chunk(3)
            own |= {f"{name} of queries": queries, f"{name} of values": values}
    apart = [float(vector_norm(ours[name].double() - value) / vector_norm(value)) for name, value in theirs.items()]
    return found | {"weights": max(apart)}


def _bare(name: str) -> str:
    return name.removeprefix("transformer.")


# One of the others, in its own process.


def peer_training(job: Mapping[str, Any]) -> Curve:
    """Train the program that ``job`` names; its last weights go into a file, under transformers' names."""
    import numpy as np  # noqa: PLC0415 - as above
    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415
    from transformers import GPT2LMHeadModel  # noqa: PLC0415

    name, recipe = job["name"], read_object(Path(job["recipe"]))
    batches = torch.from_numpy(np.load(job["batches"]))
    model: Any
    if name in {NANOGPT, ERF}:
        from dsgpt.benchmarks.contenders import nanogpt_model  # noqa: PLC0415
        from dsgpt.formats.hugging_face import published_shape  # noqa: PLC0415
        from dsgpt.model.config import GPT2Config  # noqa: PLC0415

        config = GPT2Config(**published_shape(Path(job["first"]) / "config.json"))
        model = nanogpt_model(config, Path(job["peer"]))
        rows = model.lm_head.weight[: config.vocab_size].detach().clone()  # its loss counts the logits of the padding
        model.lm_head.weight = model.transformer.wte.weight = torch.nn.Parameter(rows)
        first = {_bare(key): value for key, value in load_file(Path(job["first"]) / "model.safetensors").items()}
        with torch.no_grad():
            for key, value in model.named_parameters():
                value.copy_(first[_bare(key)].T if key.endswith(TRANSPOSED) else first[_bare(key)])
        if name == NANOGPT:
            for block in model.transformer.h:
                block.mlp.gelu = torch.nn.GELU(approximate="tanh")
    else:
        dtype = torch.float64 if name in {EXACT, EXACT_ALL} else torch.float32
        model = GPT2LMHeadModel.from_pretrained(job["first"], dtype=dtype)
    curve = _with_trainer(model, batches, recipe, job) if name == TRAINER else _plain_loop(model, batches, recipe, name)
    last = {key: value.detach() for key, value in model.state_dict().items()}
    if name in {NANOGPT, ERF}:
        last = {key: value.T if key.endswith(TRANSPOSED) else value for key, value in last.items()}
    save_file({key: value.contiguous().clone() for key, value in last.items()}, job["into"])
    return curve


def _plain_loop(model: Any, batches: Any, recipe: Mapping[str, Any], name: str) -> Curve:
    """Train by torch's AdamW, or by nanoGPT's own, with DeepSpeed's schedule and torch's clipping."""
    import torch  # noqa: PLC0415 - as above
    from deepspeed.runtime import lr_schedules  # noqa: PLC0415

    adam, curve = recipe["optimizer"]["params"], Curve()
    settings = {"lr": adam["lr"], "betas": tuple(adam["betas"])}
    if name in {NANOGPT, ERF}:
        optimizer = model.configure_optimizers(adam["weight_decay"], settings["lr"], settings["betas"], "cpu")
    else:
        matrices = [one for one in model.parameters() if one.dim() > 1]
        vectors = [one for one in model.parameters() if one.dim() < 2]
        rest = adam["weight_decay"] if name == EXACT_ALL else 0.0
        groups = [{"params": matrices, "weight_decay": adam["weight_decay"]}, {"params": vectors, "weight_decay": rest}]
        optimizer = torch.optim.AdamW(groups, **settings, eps=adam["eps"])
    schedule = getattr(lr_schedules, recipe["scheduler"]["type"])(optimizer, **recipe["scheduler"]["params"])
    model.train()
    for ids in batches:  # (B, T + 1)
        if name in {NANOGPT, ERF}:
            loss = model(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())[1]
        elif name in {EXACT, EXACT_ALL}:  # transformers' own loss rounds the logits to fp32
            logits = model(input_ids=ids[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        else:
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), recipe["gradient_clipping"])
        curve.append({"loss": loss.item(), "grad_norm": norm.item(), "lr": optimizer.param_groups[0]["lr"]})
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return curve


def _with_trainer(model: Any, batches: Any, recipe: Mapping[str, Any], job: Mapping[str, Any]) -> Curve:
    """Train by transformers' Trainer with the recipe as it is; the arguments repeat it, which Trainer insists on."""
    from transformers import Trainer, TrainingArguments  # noqa: PLC0415 - as above

    from dsgpt.strategies.deepspeed.setup import load_ops  # noqa: PLC0415

    load_ops("FusedAdamBuilder")  # DeepSpeed itself would wait for a file that a killed compilation has left
    adam, curve = recipe["optimizer"]["params"], Curve()
    settings = {"learning_rate": adam["lr"], "weight_decay": adam["weight_decay"], "adam_epsilon": adam["eps"]}
    settings |= dict(zip(("adam_beta1", "adam_beta2"), adam["betas"], strict=True))
    settings |= {"warmup_steps": recipe["scheduler"]["params"]["warmup_num_steps"], "max_steps": len(batches)}
    settings |= {"max_grad_norm": recipe["gradient_clipping"], "per_device_train_batch_size": batches.shape[1]}
    settings |= {"train_sampling_strategy": "sequential", "use_cpu": True, "deepspeed": job["recipe"]}
    settings |= {"logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    arguments = TrainingArguments(output_dir=f"{job['into']}-trainer", **settings)
    labels = batches.clone()
    labels[..., 0] = -100  # nothing predicts it, but Trainer counts it: its loss would be T / (T + 1) of the mean
    pairs = zip(batches.flatten(0, 1), labels.flatten(0, 1), strict=True)
    rows: Any = [{"input_ids": ids, "labels": targets} for ids, targets in pairs]
    trainer: Any = Trainer(model=model, args=arguments, train_dataset=rows)

    def note(_: Any, __: Any, output: Any) -> None:  # its log rounds the loss
        curve.append({"loss": output.loss.item(), "lr": trainer.optimizer.param_groups[0]["lr"]})

    model.register_forward_hook(note)
    trainer.train()
    norms = [line["grad_norm"] for line in trainer.state.log_history if "grad_norm" in line]
    return [one | {"grad_norm": norm} for one, norm in zip(curve, norms, strict=True)]


if __name__ == "__main__":
    description = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(description["mark"] + json.dumps({"curve": peer_training(description)}), flush=True)
