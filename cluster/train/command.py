"""The command `aerie train`. Its stages train tokenizer, target, draft and MTP layers; an interrupted stage resumes."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from cluster.train.card import CardFacts, write_card
from cluster.train.corpus import heldout_files, heldout_prompts, texts, train_files
from cluster.train.dataset import encode_corpus
from cluster.train.draft import DraftRecipe, train_draft
from cluster.train.eagle3 import DraftShape, save_draft
from cluster.train.mtp import save_mtp
from cluster.train.runners import MtpRecipe, train_mtp
from cluster.train.target import TargetRecipe, TargetReport, load_target, save_target, train_target
from cluster.train.tokenizer import END_OF_TEXT, IM_END, load_tokenizer, save_tokenizer, train_tokenizer

STAGES = ("tokenizer", "target", "draft", "all", "mtp")
SIZE_LIMIT = 20_000_000  # bytes of all files in the output folder, because the repository contains them


@dataclass(frozen=True)
class TrainPlan:
    """The settings of one run: folders, training times, and a recipe for each model."""

    out: Path
    work: Path
    minutes_target: float
    minutes_draft: float
    target: TargetRecipe
    draft: DraftRecipe
    mtp: MtpRecipe
    prompts: int  # how many held-out prompts measure the draft
    files: int | None  # how many train files and how many held-out files to read at most; None reads all


def quick_plan(out: Path, work: Path, layers: int) -> TrainPlan:
    """Return the plan of a run that takes seconds. Its models have the real formats but are too small to predict text.
    `layers` is the number of MTP layers.
    """
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 48, "heads": 4, "kv_heads": 2, "head_dim": 8}
    target = TargetRecipe(**sizes, layers=4, length=64)
    shape = DraftShape(**sizes, draft_vocab_size=256, aux_layer_ids=(0, 1, 2))
    draft = DraftRecipe(
        shape=shape, prompt_length=16, sample_length=16, samples=8, sample_batch=4, length=64, tokens_per_step=256
    )
    mtp = MtpRecipe(layers, steps=3, draft=draft)
    return TrainPlan(out, work, 0.02, 0.02, target, draft, mtp, prompts=2, files=6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `aerie train`."""
    parser.add_argument(
        "stage", nargs="?", choices=STAGES, default="all", help="what to train; all (default) leaves out mtp"
    )
    parser.add_argument("--out", type=Path, help="where target/, draft/ and README.md go (default: models/demo)")
    parser.add_argument("--work", type=Path, help="checkpoints, encoded text and samples (default: runs/demo)")
    parser.add_argument("--minutes-target", type=float, default=50.0, help="training time of the target")
    parser.add_argument("--minutes-draft", type=float, default=38.0, help="training time of the draft")
    parser.add_argument(
        "--mtp-layers", type=int, choices=(1, 3), default=3, help="a layer for each of 3 levels, or one layer for all"
    )
    parser.add_argument("--mtp-steps", type=int, default=MtpRecipe.steps, help="training steps of the MTP layers")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--quick", action="store_true", help="a run of seconds, to show that every stage works")


def plan_of(args: argparse.Namespace) -> TrainPlan:
    """Return the plan for parsed arguments."""
    if args.quick:
        return quick_plan(args.out or Path("runs/quick/out"), args.work or Path("runs/quick/work"), args.mtp_layers)
    out, work = args.out or Path("models/demo"), args.work or Path("runs/demo")
    recipes = TargetRecipe(), DraftRecipe(), MtpRecipe(args.mtp_layers, steps=args.mtp_steps)
    return TrainPlan(out, work, args.minutes_target, args.minutes_draft, *recipes, prompts=40, files=None)


def run(args: argparse.Namespace) -> int:
    """Run the requested stages; return 1 if the output folder is larger than `SIZE_LIMIT`, else 0."""
    torch.set_num_threads(args.threads)
    plan = plan_of(args)
    stages = ("tokenizer", "target", "draft") if args.stage == "all" else (args.stage,)
    for stage in stages:
        {"tokenizer": run_tokenizer, "target": run_target, "draft": run_draft, "mtp": run_mtp}[stage](plan)
    size = sum(file.stat().st_size for file in plan.out.rglob("*") if file.is_file())
    print(f"{plan.out}: {size:,} bytes")
    if size > SIZE_LIMIT:
        print(f"error: {plan.out} is larger than {SIZE_LIMIT:,} bytes", file=sys.stderr)
        return 1
    return 0


def run_tokenizer(plan: TrainPlan) -> None:
    """Train the tokenizer unless the work folder has one, and save it in the target's folder."""
    source = plan.work / "tokenizer"
    if not (source / "tokenizer.json").exists():
        paths = train_files()[: plan.files]
        save_tokenizer(train_tokenizer(texts(paths), plan.target.vocab_size), source)
    save_tokenizer(Tokenizer.from_file(str(source / "tokenizer.json")), plan.out / "target")


def run_target(plan: TrainPlan) -> None:
    """Train the target and save it in bf16."""
    tokenizer = load_tokenizer(plan.out / "target")
    train, heldout = encode_corpus(tokenizer, plan.work / "corpus.npz", files=plan.files)
    target, report = train_target(
        plan.target, train, heldout, minutes=plan.minutes_target, checkpoint=plan.work / "target.pt"
    )
    stop_ids = [tokenizer.get_vocab()[token] for token in (END_OF_TEXT, IM_END)]
    save_target(target, plan.out / "target", stop_ids)
    (plan.work / "target.json").write_text(json.dumps(asdict(report)))
    print(f"target: {report}")


def run_draft(plan: TrainPlan) -> None:
    """Train the draft for the saved target, save it in bf16 and write the model card."""
    tokenizer = load_tokenizer(plan.out / "target")
    train, heldout = encode_corpus(tokenizer, plan.work / "corpus.npz", files=plan.files)
    prompts = heldout_prompts(tokenizer, plan.prompts, plan.draft.prompt_length)
    target = load_target(plan.out / "target")
    draft, report = train_draft(plan.draft, target, train, prompts, minutes=plan.minutes_draft, work=plan.work)
    save_draft(draft, plan.out / "draft")
    (plan.work / "draft.json").write_text(json.dumps(asdict(report)))
    facts = CardFacts(
        target=plan.target,
        draft=plan.draft,
        target_report=TargetReport(**json.loads((plan.work / "target.json").read_text())),
        draft_report=report,
        train_tokens=len(train),
        heldout_tokens=len(heldout),
        heldout_bytes=sum(len(text.encode()) for text in texts(heldout_files())),
        heldout_files=len(heldout_files()),
        train_files=len(train_files()),
        parameters=(
            sum(parameter.numel() for parameter in target.parameters()),
            sum(parameter.numel() for parameter in draft.parameters()),
        ),
    )
    write_card(plan.out / "README.md", facts)
    for temperature, acceptance in report.acceptance.items():
        print(f"draft: T={temperature} {acceptance}")


def run_mtp(plan: TrainPlan) -> None:
    """Train MTP layers for the saved target. Save them in the work folder, as they are too large for the repository."""
    train, _ = encode_corpus(load_tokenizer(plan.out / "target"), plan.work / "corpus.npz", files=plan.files)
    draft = train_mtp(plan.mtp, load_target(plan.out / "target"), train, work=plan.work)
    folder = plan.work / f"mtp-{plan.mtp.layers}"
    save_mtp(draft, folder)
    print(f"mtp: {folder}, {sum(parameter.numel() for parameter in draft.parameters()):,} trained parameters")
