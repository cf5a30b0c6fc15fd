"""Whether data are enough for a training: windows of tokens, and samples of a user's own dataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from launcher.base.errors import ConfigError, Fault, offer
from launcher.contract.config import LaunchConfig
from launcher.contract.data.blend import Blend
from launcher.contract.data.config import BYTES, DataConfig
from launcher.contract.data.files import TOKENS, SourceFile, package_faults, source_files, unused_faults
from launcher.contract.data.prepared import cache_folder, list_path, read_prepared
from launcher.contract.data.token_files import token_file
from launcher.contract.data.tokenizer import read_tokenizer
from launcher.contract.plan import BatchPlan


def num_training_part(num_all: int, eval_fraction: float) -> int:
    """How many of the tokens or samples are trained on; the rest, at the end, are held out for evaluation.

    >>> num_training_part(101, 0.05)
    96
    """
    return num_all - int(num_all * eval_fraction)


def num_windows(num_tokens: int, seq_length: int) -> int:
    """Samples of a text: non-overlapping windows, each with the token after it as its last label.

    >>> num_windows(128, 64), num_windows(129, 64), num_windows(0, 64)
    (1, 2, 0)
    """
    return max(0, num_tokens - 1) // seq_length


@dataclass(frozen=True, kw_only=True)
class SourceTokens:
    """What is known of a source."""

    setting: str
    source: str
    files: tuple[SourceFile, ...]
    num_tokens: int | None
    """None: its text has not been tokenised yet."""
    highest: int | None = None
    """The highest id, where all were looked at."""


def sources_tokens(config: LaunchConfig) -> list[SourceTokens]:
    """What is known of every source, that of the evaluation included.

    Raises:
        ConfigError: with what is wrong with the files, the tokenizer, or the settings that are about them.
    """
    data = config.data
    read_tokenizer(data)
    found: list[SourceTokens] = []
    faults: list[Fault] = []
    for setting in data.all_sources:
        try:
            files = source_files(data, setting)
            faults += package_faults(data, setting, files)
            found.append(_source_tokens(data, setting, files, config.run.root))
        except ConfigError as error:
            faults += error.faults
    faults += [] if faults else unused_faults(data, [file for each in found for file in each.files])
    if faults:
        raise ConfigError(faults)
    return found


def _source_tokens(data: DataConfig, setting: str, files: Sequence[SourceFile], root: str) -> SourceTokens:
    prepared = read_prepared(list_path(data, files, cache_folder(data, root)))
    source, highest, num_tokens = data.all_sources[setting], None, None
    if prepared is not None:
        num_tokens, highest = prepared.num_tokens, prepared.highest
    elif all(file.kind in TOKENS for file in files):
        try:
            num_tokens = sum(token_file(file, data).num_tokens for file in files)
        except (ValueError, OSError) as error:
            fix = "Name files that hold what their names say."
            raise ConfigError([Fault(setting, source, str(error), fix)]) from None
    elif data.tokenizer == BYTES and all(file.kind == "text" for file in files):
        num_tokens = sum(file.size for file in files)
    return SourceTokens(
        setting=setting, source=source, files=tuple(files), num_tokens=num_tokens, highest=highest
    )


def needs_preparing(data: DataConfig, found: SourceTokens, root: str) -> bool:
    """Whether tokens have to be made, or to be looked at, before ranks start; bytes of text they copy in no
    time themselves."""
    if data.tokenizer == BYTES and all(file.kind == "text" for file in found.files):
        return False
    return read_prepared(list_path(data, found.files, cache_folder(data, root))) is None


def text_faults(config: LaunchConfig, batch: BatchPlan) -> list[Fault]:
    """The faults of ``data.source``: no text, or too little for a step or for the evaluations. Of text that
    is not tokenised yet it is not known how much it is."""
    try:
        found = sources_tokens(config)
    except ConfigError as error:
        return list(error.faults)
    numbers = [each.num_tokens for each in found]
    known = [number for number in numbers if number is not None]
    faults = list(_high_ids(config, found))
    return faults if len(known) < len(found) else [*faults, *token_faults(config, batch, known)]


def token_faults(config: LaunchConfig, batch: BatchPlan, num_tokens: Sequence[int]) -> Iterator[Fault]:
    """The faults of too few tokens in each source. ``num_tokens``: that of the evaluation comes last."""
    data, seq_length = config.data, config.batch.seq_length
    of_sources = num_tokens[: len(data.sources)]
    trained = [training_tokens(data, number) for number in of_sources]
    held_out = [number - part for number, part in zip(of_sources, trained, strict=True)]
    training, evaluation = (
        [num_windows(part, seq_length) for part in parts] for parts in (trained, held_out)
    )
    if data.eval_source is not None:
        yield from sample_faults(config, batch, sum(training), num_windows(num_tokens[-1], seq_length))
    elif len(of_sources) == 1:
        yield from sample_faults(config, batch, training[0], evaluation[0])
    else:
        num_evaluated = config.train.eval_batches * batch.global_size
        yield from sample_faults(config, batch, sum(training), num_evaluated)
        yield from _blend_faults(config, batch, evaluation)
    for (setting, source), number in zip(data.sources.items(), training, strict=True):
        if not number and len(of_sources) > 1:
            rule = f"has no sample of batch.seq_length = {seq_length} tokens to train on"
            yield Fault(setting, source, rule, "Give more data, or leave it out of the blend.")


def training_tokens(data: DataConfig, num_tokens: int) -> int:
    """How many tokens of a source are trained on."""
    return num_training_part(num_tokens, 0 if data.eval_source is not None else data.eval_fraction)


def _blend_faults(config: LaunchConfig, batch: BatchPlan, evaluation: Sequence[int]) -> Iterator[Fault]:
    """A source of a blend with too little for its share of the evaluations."""
    data, blend = config.data, Blend(config.data.weights)
    num_samples = config.train.eval_batches * batch.global_size
    for number, (setting, source) in enumerate(data.sources.items()):
        if (needed := blend.num_samples(number, num_samples)) > evaluation[number]:
            rule = (
                f"gives {needed} of the {num_samples} samples of an evaluation, and has {evaluation[number]}"
            )
            fix = "Set fewer train.eval_batches, a larger data.eval_fraction, or data.eval_source."
            yield Fault(setting, source, rule, fix, ways=({"train.eval_batches": 0},))


def _high_ids(config: LaunchConfig, found: Sequence[SourceTokens]) -> Iterator[Fault]:
    """Ids for which the model has no row."""
    vocab = config.model.vocab_size
    for each in found:
        if vocab is not None and each.highest is not None and each.highest >= vocab:
            rule = f"{each.source} holds the id {each.highest}, and ids are 0 to {vocab - 1}"
            way = {"model.vocab_size": each.highest + 1}
            yield Fault("model.vocab_size", vocab, rule, ways=(way,))


def own_data_faults(config: LaunchConfig, batch: BatchPlan, num_samples: int) -> Iterator[Fault]:
    """The faults of a user's own dataset with too few samples."""
    num_training = num_training_part(num_samples, config.data.eval_fraction)
    yield from sample_faults(config, batch, num_training, num_samples - num_training)


def sample_faults(
    config: LaunchConfig, batch: BatchPlan, num_training: int, num_evaluation: int
) -> Iterator[Fault]:
    """The faults of too few samples for one step, or for the evaluations."""
    name, size = config.data.target or config.data.name, batch.global_size
    if num_training < size:
        more = "more data" if config.data.target else "more data, or a smaller batch.seq_length"
        rule = f"needs as many samples, and the training part of {name} has {num_training}: give {more}"
        # Whichever of the two other sizes is given, it is a multiple of that one on all replicas.
        unit = lcm(size // batch.num_microbatches, size // batch.micro_size)
        fitting = num_training // unit * unit
        ways = ({"batch.global_size": fitting},) if fitting else ()
        yield Fault("batch.global_size", size, rule, ways=ways)
    batches, of = config.train.eval_batches, f"the evaluation part of {name}"
    if num_evaluation < batches * size:
        where = f"{of} (data.eval_fraction={config.data.eval_fraction:g})"
        where = where if config.data.eval_source is None else "data.eval_source"
        rule = f"needs {batches} * {size} = {batches * size} samples; {where} has {num_evaluation}"
        fewer = ({"train.eval_batches": num_evaluation // size},)
        larger = "a larger data.eval_fraction" if config.data.eval_source is None else "more of it"
        yield Fault("train.eval_batches", batches, rule, f"{offer(fewer)[:-1]}, or {larger}.", ways=fewer)
