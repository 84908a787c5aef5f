"""Fine-tunes the base model to follow instructions: stories with three requested words, and word problems, mixed.

    python finetune.py          2.5 passes over stories and problems; half an hour to an hour and a half on two cores
    python finetune.py 0.3      three tenths of a pass
    python finetune.py --resume

Reads `checkpoints/base.pt`, `data/stories-train.jsonl` (from `prepare.py`) and generated problems (`situations.py`).
Writes `checkpoints/finetuned.pt` in bfloat16, the model of the last step, and `runs/finetune-TIME/`.

The loss is on answers only: the prompt and what the calculator supplies are read, never learned; the end of text is
learned, so that stopping is. A conversation that does not fit the context is dropped and counted, as a story cut in
the middle would teach to stop nowhere.
Source: Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155), step 1; calculator calls: Cobbe et al. 2021 (arXiv
2110.14168).
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import tyro
from tqdm import tqdm

import checkpoint
import problems
import runtime
import situations
import stories
import tokenizer
import training
from model import GPT, mean_loss, padded, token_log_probs
from problems import Problem
from runtime import Checked, Count, Device, Log, Passes, Positive, Precision, Seed, Share, UserError
from stories import Story
from tokenizer import Tokenizer
from training import Guard, Learner, Session

STATE = checkpoint.FOLDER / "finetuned-state.pt"


@dataclass(frozen=True, slots=True)
class Config(Checked):
    """Settings of a fine-tuning run."""

    # Over stories and problems.
    passes: Annotated[Passes, tyro.conf.Positional, tyro.conf.arg(metavar="PASSES")] = 2.5
    resume: bool = False  # go on with a run that was stopped
    problems: Annotated[int, runtime.NOT_NEGATIVE] = 10_000  # generated word problems among the conversations
    batch: Count = 16  # conversations a step
    lr: Positive = 1e-3  # at its peak, half of pre-training's
    warmup: Count = 50  # steps of rising learning rate
    weight_decay: Annotated[float, runtime.NOT_NEGATIVE] = 0.1  # on matrices only
    beta2: Share = 0.95  # of Adam
    max_norm: Positive = 1.0  # of the gradient, clipped there
    dropout: Share = 0.0  # the held-out loss falls to the end of 2.5 passes: nothing is learned by heart yet
    heldout: Count = 200  # conversations kept for the held-out loss
    evaluate_every: Count = 100  # steps
    sort_batches: Count = 16  # batches sorted by length together, so that rows of a batch need little padding
    seed: Seed = 1
    device: Device = "auto"
    precision: Precision = "auto"
    base: Path = checkpoint.BASE
    stories: Path = stories.TRAIN_STORIES


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt with its answer."""

    ids: list[int]  # the prompt's tokens, the answer's, and the end of text
    counts: list[bool]  # for each of `ids`, whether it is learned


def story_conversation(story: Story, coder: Tokenizer) -> Conversation:
    """The request for a story's words, answered by the story."""
    prompt = coder.prompt(tokenizer.story_request(story.words))
    answer = [*coder.encode(story.text), coder.end]
    return Conversation(prompt + answer, [False] * len(prompt) + [True] * len(answer))


def problem_conversation(problem: Problem, coder: Tokenizer) -> Conversation:
    """A word problem, answered step by step; what the calculator supplies does not count.

    The pieces around a calculator's result are encoded apart, as they arise when the answer is written.
    """
    ids = coder.prompt(problem.question)
    counts = [False] * len(ids)
    for text, written in problems.segments(problem.answer):
        piece = coder.encode(text)
        ids += piece
        counts += [written] * len(piece)
    return Conversation([*ids, coder.end], [*counts, True])


def read_story_lines(path: Path) -> list[Story]:
    """Stories with their words, from the file that `prepare.py` writes.

    Raises: UserError where the file is missing, empty, or has a line that is not such a story.
    """
    told = []
    for number, line in enumerate(stories.lines_of(stories.read_text(path, "python prepare.py makes it")), start=1):
        try:
            row = json.loads(line)
            told.append(Story(row["story"].strip(), stories.checked_words(row["words"])))
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}, line {number} is no story with words: python prepare.py makes it anew") from None
    return told


def fitting(conversations: Sequence[Conversation], context: int) -> list[Conversation]:
    """The conversations that fit the context whole.

    Raises: UserError where none does.
    """
    kept = [conversation for conversation in conversations if len(conversation.ids) <= context]
    if not kept:
        raise UserError(
            f"none of the {len(conversations)} conversations fits the context of {context} tokens: pass shorter stories"
        )
    return kept


def batches(lengths: Sequence[int], batch: int, sort_batches: int, seed: int, number: int) -> list[numpy.ndarray]:
    """Rows of each batch of pass `number`: random, but rows of a batch have similar lengths."""
    rng = numpy.random.default_rng([seed, number])
    order = rng.permutation(len(lengths))
    chunks = [order[start : start + batch * sort_batches] for start in range(0, len(order), batch * sort_batches)]
    by_length = [chunk[numpy.argsort(numpy.asarray(lengths)[chunk], kind="stable")] for chunk in chunks]
    rows = [chunk[start : start + batch] for chunk in by_length for start in range(0, len(chunk), batch)]
    return [rows[index] for index in rng.permutation(len(rows))]


def answer_loss(model: GPT, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """() mean loss, nats, of the tokens that count. ids: (B, T). mask: (B, T-1) true at t where token t+1 counts."""
    return -token_log_probs(model, ids, mask).sum() / mask.sum()


def finetune(learner: Learner, conversations: list[Conversation], config: Config, log: Log, session: Session) -> float:
    """Trains the model in place; returns its loss on held-out answers, nats a token."""
    model, guard = learner.model, learner.guard
    heldout, train = conversations[: config.heldout], conversations[config.heldout :]
    lengths = [len(conversation.ids) for conversation in train]
    a_pass = -(-len(train) // config.batch)
    steps = max(1, round(config.passes * a_pass))
    order = batches(lengths, config.batch, config.sort_batches, config.seed, learner.step // a_pass)
    bar = tqdm(total=steps, initial=learner.step, desc="finetune", unit="step", disable=None)
    tokens, began = 0, time.monotonic()
    while learner.step < steps:
        if learner.step % a_pass == 0:
            order = batches(lengths, config.batch, config.sort_batches, config.seed, learner.step // a_pass)
        rows = [train[index] for index in order[learner.step % a_pass]]
        ids, mask = padded([row.ids for row in rows], [row.counts for row in rows], model.device)
        lr = training.linear_rate(learner.step, steps, config.warmup, config.lr)
        training.set_rate(guard.optimizer, lr)
        model.train()
        with runtime.autocast(model.device, config.precision):
            loss = answer_loss(model, ids, mask)
        guard.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        norm = guard.step(loss)
        if norm is not None:
            learner.seen.append(loss.item())
        learner.step += 1
        bar.update()
        tokens += sum(len(row.ids) for row in rows)
        evaluates = learner.step % config.evaluate_every == 0 or learner.step == steps
        if not evaluates and not session.asked:
            continue
        seconds = time.monotonic() - began
        learner.seconds += seconds
        if evaluates:
            model.eval()
            with runtime.autocast(model.device, config.precision):
                found = mean_loss(model, [row.ids for row in heldout], [row.counts for row in heldout], config.batch)
            learner.best = found
            bar.write(training.logged_evaluation(learner, steps, log, found, lr, norm, tokens / seconds))
        training.write_state(STATE, config, log, learner.state())
        if session.asked and learner.step < steps:
            session.leave()
        tokens, began = 0, time.monotonic()
    bar.close()
    if learner.best is None or learner.step > steps:
        raise UserError(f"PASSES {config.passes:g}: the run has had {learner.step} of its {steps} steps; give more")
    return learner.best


def conversations_of(config: Config, coder: Tokenizer, context: int) -> list[Conversation]:
    """Stories and problems mixed, in random order, the same for each run of a seed.

    Raises: UserError where too few fit the context.
    """
    told = [story_conversation(story, coder) for story in read_story_lines(config.stories)]
    drawn = situations.generated_problems(config.problems, config.seed, "train")
    solved = [problem_conversation(problem, coder) for problem in drawn]
    fit = fitting(told + solved, context)
    dropped = len(told) + len(solved) - len(fit)
    print(f"{len(told):,} stories and {len(solved):,} problems, {dropped:,} dropped as longer than the context")
    if len(fit) <= config.heldout:
        raise UserError(f"{len(fit)} conversations, {config.heldout} of them held out: pass more or lower --heldout")
    return [fit[index] for index in numpy.random.default_rng(config.seed).permutation(len(fit))]


def main() -> None:
    config = runtime.parse(Config, __doc__)
    runtime.seed_everything(config.seed)
    device = runtime.device_for(config.device)
    coder = tokenizer.load()
    facts: dict[str, Any] = {**runtime.machine_facts(device, config.precision, config.seed), "parent": str(config.base)}
    with training.session(STATE) as session:
        state = training.read_state(STATE, config, budget=("passes",)) if config.resume else None
        model, parent = checkpoint.load(config.base, device, coder.vocabulary, config.dropout)
        conversations = conversations_of(config, coder, model.config.context)
        optimizer = training.adamw(model, config.lr, config.beta2, config.weight_decay)
        learner = Learner(model, Guard(optimizer, config.max_norm))
        learner.inputs = training.fingerprint(checkpoint.fingerprint(model.state_dict()), conversations)
        training.resume(learner, state, STATE)
        with training.log_of("finetune", config, facts, state) as log:
            if state is None:
                training.clear(STATE.parent, STATE.name)
            loss = finetune(learner, conversations, config, log, session)
        facts |= {"heldout_loss": loss, "passes": config.passes, "base": parent}
        checkpoint.save(checkpoint.FINETUNED, model, facts, torch.bfloat16)
    print(f"{checkpoint.FINETUNED}: {loss:.3f} nats a token on held-out answers")


if __name__ == "__main__":
    runtime.run(main)
