"""Prune a checkpoint to a speed, a time, a size or a share of its MACs: `prune_to`, and `bertlite prune to`."""

import copy
import math
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertlite.checkpoint.folders import EVERYTHING, check_output
from bertlite.checkpoint.saving import file_size
from bertlite.experiments.budget.distil import Distillation
from bertlite.experiments.budget.mapping import MAP_NEEDS, MAP_TAKES, fit_map, layer_of_map
from bertlite.experiments.budget.quality import Quality, evaluate_pruned
from bertlite.experiments.budget.report import LIKENESS, facts_of, figures_of, how_made, print_report
from bertlite.experiments.budget.search import SETTINGS_FILE, Search, State, map_bytes, speed_of
from bertlite.experiments.budget.target import Target, check_work, read_work, spare_bytes
from bertlite.experiments.budget.texts import Texts, batches_of, draw_texts, read_both
from bertlite.experiments.budget.vocabulary import with_fewer_tokens
from bertlite.experiments.data import Examples, encode_examples, read_length
from bertlite.experiments.files import as_checkpoint, model_key
from bertlite.experiments.settings import PruneSettings
from bertlite.inference.checks import ComputeDtype
from bertlite.inference.optimize import GRAPHS, PLAIN, optimize_for_inference, parse_compute_dtype
from bertlite.models.base import BertModel, BertPreTrainedModel
from bertlite.models.heads import MultipleChoiceBody
from bertlite.opened.checkpoint import Checkpoint
from bertlite.pruning.importance.least_squares import FEWEST_TOKENS_OF_INPUT
from bertlite.shipping.folder import REPORT, write_model
from bertlite.shipping.vectors import MEAN, VectorHead, read_head, with_map
from bertlite.support.environment import environment
from bertlite.support.files import lock_folder, read_json_object
from bertlite.support.memory import peak_memory
from bertlite.support.process import door
from bertlite.support.progress import Progress
from bertlite.tokenizer import BertTokenizer

LONGER = 2  # texts to judge by that are longer than those to fit to by this factor are warned of
TRAINING = ("distil", "trained on")  # do not determine a search
NOT_UNSEEN = (
    "These texts were held out: the model was not fitted to them. If the given model was trained on them, results on"
    " unseen texts may be worse: give --dev FILE."
)
DEFAULTS = PruneSettings()


@door
def prune_to(
    checkpoint: str | PathLike[str] | BertPreTrainedModel,
    target: str | Sequence[str],
    texts: Texts,
    folder: str | PathLike[str],
    *,
    tokenizer: BertTokenizer | None = None,
    dev: Texts | None = None,
    settings: PruneSettings = DEFAULTS,
    keep: str | PathLike[str] | None = None,
    progress: bool = False,
) -> dict[str, Any]:
    """Prune a checkpoint to a budget of time, work or size, and write it with its tokenizer, a card and its report.

    A killed search or training continues where it stopped when it is called again with the same model, texts and
    settings; finished parts are not done again.

    Args:
        checkpoint: a folder or a hub id; or a loaded model, which is not changed.  If that is an encoder, its vectors
            are the means of its states, since it does not have the modules of its folder.
        target: "2x", "40%", "15ms" or "30MB", and "2x+" for 2x or more; or several, which share one search.
        texts: a file of texts of the kind that the model will see, or the texts: strings, or pairs of them.
        folder: the folder to write; for several targets each has a folder in it, such as FOLDER/2x.
        tokenizer: the tokenizer of a loaded model, or another one for a checkpoint; by default the checkpoint's.
        dev: texts that the model was not trained on, to judge by; by default a held-out fifth of the texts.
        keep: folder for gradients, curves, times and pruned layers, for other targets or a longer training of the same
            model and texts; by default they are deleted at the end.
        progress: show the progress, and print each report.

    Returns:
        The record: a report, as in report.json; for several targets the reports, as "targets", and the "environment".

    Raises:
        BlockingIOError: another process is writing to the folder.
        FileExistsError: the folder holds something else.
        FileNotFoundError: there is no such checkpoint or file.
        ModuleNotFoundError: a package of the extra `experiments` is not installed.
        ValueError: the target is not valid or cannot be met, a text or a label does not fit the model, a setting does
            not fit the target, there are too few texts or minutes, or unfinished work has other settings.
    """
    folder = Path(folder).expanduser()
    settings = replace(settings, backend=timing_backend(settings))
    targets = read_targets([target] if isinstance(target, str) else [*target], settings.size, folder)

    # Unfinished work has a folder of its own, where a call that continues a killed one finds it.
    whole = folder.resolve()  # "." has no name
    place = whole.with_name(f".{whole.name}.unfinished") if keep is None else Path(keep).expanduser()
    if keep is None:
        check_output(place, EVERYTHING, checkpoint, texts, dev, own=True)  # removed at the end

    # All targets are one job: they share gradients, curves and times, which do not depend on the target.
    with lock_folder(folder), as_checkpoint(checkpoint, tokenizer) as (source, named):
        job = PruneJob(source, named, texts, dev, settings)
        reports = prune_all(job, targets, place, progress)
        if keep is None:
            shutil.rmtree(place)

    # The record of one target is its report, so that scripts find the same keys in both.
    if len(reports) == 1:
        return reports[0]
    return {"what": "bertlite prune to", "targets": reports, "environment": environment(settings.device)}


class PruneJob:
    """The common part of a command's targets: the given model, the texts, and everything that determines a result.

    `settings` have the length and the backend that they come to for the given model; `search` makes the Search for a
    target.  `judged` are batches to compare models on, and `to_map` batches to fit a map to, none without a map; `map`
    is a layer of its size, which counts as a part of each pruned model.  `inputs` are hashes of the model and of the
    texts, which determine a result together with the settings; `texts` are numbers and origin, for the report.

    Args:
        named: the checkpoint in the report; None for a loaded model.

    Raises:
        ValueError: as for `prune_to`, except for targets.
    """

    def __init__(
        self, source: Checkpoint, named: str | None, texts: Texts, dev: Texts | None, settings: PruneSettings
    ) -> None:
        # A command may take hours, so whatever can be read or refused without the model comes first.
        self.source, self.named = source, named
        source.hold()
        config = source.config
        if config.is_decoder:
            raise ValueError(f"{source} is a decoder; `prune to` takes encoders")
        self.work = read_work(settings.at, settings.lengths, settings.batch_size)
        check_work(self.work, config)
        every, judging = read_both(texts, dev, settings, config)

        # The model decides whatever the settings leave open: the length of texts, and the backend behind "auto".
        self.given = given = GivenModel(source, every, judging, settings)
        self.plain = settings.backend == PLAIN  # models are timed as they are, so single layers can be timed
        self.settings, timed = read_clock(given, settings)
        longest = min(read_length(settings.max_length, given.tokenizer), config.max_position_embeddings)

        # Fitted layers do better on their own texts than on others, so the judgement gets others.
        fit, rest, held_out = draw_texts(every, judging, given.model, given.tokenizer, longest, settings)
        mapped = texts_for_map(rest, given, settings)
        batches, self.judged, self.to_map = (
            batches_of(each, given.tokenizer, given.model, longest) for each in (fit, held_out, mapped)
        )
        tokens, of_judged = (sum(int(x["attention_mask"].sum()) for x in each) for each in (batches, self.judged))
        warn_of_few_texts(tokens, len(fit), config.intermediate_size)
        warn_of_long_texts(tokens / len(fit), of_judged / len(held_out))

        # The map runs with every pruned model, so that its time and its bytes count from the start.
        self.map = layer_of_map(given.head, config) if self.to_map else None
        self.search: Callable[..., Search] = partial(
            Search,
            given.model,
            batches,
            **timed,
            work=self.work,
            gradients="loss" if fit.labels else "kl",
            seed=settings.seed,
            dense_bytes=given.facts["dense_bytes"],
            map=self.map,
        )

        # A training may learn from every text that nothing is judged by.
        self.distillation: Distillation | None = None
        if settings.distil is not None:
            score = Quality(given.model, self.judged, given.head)
            data, chosen = encode_examples(rest, given.tokenizer, longest), (settings.seed, settings.device)
            self.distillation = Distillation(given.model, data, bool(rest.labels), settings.distil, score, *chosen)

        # The files of a killed search are used again only if all of these are the same.
        self.inputs = {
            "texts": fit.sha256,
            "model": model_key(given.model, given.tokenizer, given.head),
            "judged": held_out.sha256,
            "lengths": list(self.work.lengths),
            "trained on": None if settings.distil is None else rest.sha256,
            "mapped by": mapped.sha256,
        }

        # And the report tells where the texts came from.
        note = None if judging else NOT_UNSEEN
        counts = {"fitted to": len(fit), "mapped": len(mapped), "held out": len(held_out)}
        self.texts = {**counts, "of": held_out.name, "note": note}

    @property
    def shared(self) -> dict[str, Any]:
        """Everything that determines gradients and curves."""
        return {**self.settings.determining(curves=True), **{name: self.inputs[name] for name in ("texts", "model")}}

    def determining(self, target: Target) -> dict[str, Any]:
        """Return everything that determines the result for a target; "allocate" is the cost that sizes are chosen by.

        Only plain models have single layers that can be timed.
        """
        allocate = "bytes" if target.is_size else "latency" if target.is_timed and self.plain else "macs"
        return {**self.settings.determining(), **self.inputs, "allocate": allocate, "target": target.text}

    def limit(self, lost: dict[str, Any]) -> dict[str, Any]:
        """Return the most that a model should lose, and whether it loses too much for the exit status.

        Warns if it loses more.
        """
        allowed = self.settings.lose_at_most
        most = lost["normal"] if allowed is None else allowed
        more = not lost["points"] <= most  # nan too
        if more:
            what = "a MiniLM normally does" if allowed is None else "--lose-at-most allows"
            warnings.warn(
                f"the pruned model loses {lost['points']:.1f} points of {lost['of']}, more than {what}"
                f" ({most:g}): give more texts, a larger budget or --distil",
                stacklevel=2,
            )
        return {"limit": most, "too_much": more and (allowed is not None or self.texts["note"] is None)}

    def fit_map(self, model: Any, progress: Progress) -> VectorHead | None:
        """Return how vectors are made with a map to the given model's; None without texts to fit it to."""
        if not self.to_map:
            return None
        shown = progress.over("map after the pooling", self.to_map, "batches")
        return with_map(self.given.head, fit_map(model, self.given.model, shown, self.given.head))

    def judge(self, model: Any, mapped: VectorHead | None, search: Search, progress: Progress) -> dict[str, Any]:
        """Compare a model, in the dtype that it will run in, with the given one on the texts to judge by.

        The same without its map, and for the given model in that dtype, is in "without_map" and "alone".
        """
        given = self.given

        def compare(each: Any, batches: Iterable[dict[str, Tensor]], head: VectorHead | None) -> dict[str, Any]:
            running = search.prepare(each) if search.converts else each
            return evaluate_pruned(getattr(running, "model", running), given.model, batches, given.head, head)

        def alike(each: Any) -> dict[str, Any]:
            found = compare(each, self.judged, None)
            return {name: found[name] for name in (*LIKENESS, "score") if name in found}

        results = compare(model, progress.over("comparing", self.judged, "batches"), mapped)
        results["without_map"] = {} if mapped is None else alike(model)
        results["alone"] = {**speed_of(search.unpruned[0]), **alike(given.model)} if search.converts else None
        return {**results, "lost": results["lost"] | self.limit(results["lost"])}

    def prune(
        self, target: Target, folder: Path, settings: dict[str, Any], state: State, progress: bool
    ) -> dict[str, Any]:
        """Prune to a target, write the folder and return its report."""
        began, cpu_began = time.perf_counter(), time.process_time()
        own = state.part({name: value for name, value in settings.items() if name not in TRAINING})
        training = own.part(settings)

        # Search, train, fit the map and judge; a killed process finds each finished part in its state.
        with Progress(None, "steps", what=f"prune to {target.text}", shown=progress) as bar:
            search = self.search(target=target, by=settings["allocate"], shared=state, state=own, progress=bar)
            model, plan, times, verdict = search.find()
            trained = self.distillation and self.distillation.train_(model, training, bar)
            mapped = self.fit_map(model, bar)
            results = self.judge(model, mapped, search, bar)

        report = {
            "what": "bertlite prune to",
            "target": target.text,
            "work": self.work.name,
            "checkpoint": self.named,
            "settings": settings,
            "texts": self.texts,
            **self.given.facts,
            # The measurements, and the machine that they were made on.
            **facts_of(model, plan, times, "constant" if results["constant"] else verdict, map_bytes(self.map)),
            **results,
            "distilled": trained,
            "environment": environment(self.settings.device),
            "peak_bytes": peak_memory(),
            "wall_seconds": round(time.perf_counter() - began, 1),
            "cpu_seconds": round(time.process_time() - cpu_began, 1),
        }

        # The folder is written last, in one step; only then is the state of the training worth nothing.
        about: dict[str, Any] = {"figures": figures_of(report), "how": how_made(report), "report": report}
        write_model(folder, model, self.source, tokenizer=self.given.tokenizer, mapped=mapped, **about)
        if progress:
            print_report(report, folder)
        shutil.rmtree(training.folder)
        return report


class GivenModel:
    """The model to prune, with fewer tokens if the settings ask for that.

    `head` is how an encoder makes vectors; `facts` are the sizes of the files, of the process and of the vocabulary,
    for the report.

    Raises:
        ValueError: the model chooses between texts, and files of texts have no groups.
    """

    def __init__(self, source: Checkpoint, texts: Examples, dev: Examples | None, settings: PruneSettings) -> None:
        kind, start = source.model_class, peak_memory()
        if issubclass(kind, MultipleChoiceBody):
            raise ValueError(f"{kind.__name__} reads groups of texts, not rows: use bertlite.pruning.prune_layerwise")
        self.model: Any = source.load(kind, device=settings.device)
        self.tokenizer = copy.copy(source.tokenizer)
        self.head = read_head(source) if isinstance(self.model, BertModel) else MEAN

        # A target of size may be a share of the given file, which still has all tokens.
        self.facts: dict[str, Any] = {"dense_bytes": file_size(self.model), "start_bytes": start}
        if settings.vocabulary:
            few = with_fewer_tokens(self.model, self.tokenizer, texts, dev, 0, settings.max_length)
            self.model, self.tokenizer, self.facts["vocabulary"] = few


def read_clock(given: GivenModel, settings: PruneSettings) -> tuple[PruneSettings, dict[str, Any]]:
    """Return settings with the length and the backend that they come to, and the options of a Search for timing.

    Raises:
        ValueError: the model cannot be timed so.
    """
    own = given.model.dtype
    dtype = parse_compute_dtype(settings.dtype) or own
    timed = as_timed(given.model, dtype, str(settings.backend))
    backend = getattr(timed, "backend", PLAIN)

    # A gain of the dtype counts towards the target: the given model runs in its own, the pruned ones in the other.
    if dtype != own:
        timed = as_timed(given.model, own, backend)
    length = read_length(settings.max_length, given.tokenizer)
    prepare = partial(as_timed, dtype=dtype, backend=backend)
    options = {"timed": timed, "prepare": prepare, "converts": dtype != own}
    return replace(settings, max_length=length, backend=backend), options


def texts_for_map(rest: Examples, given: GivenModel, settings: PruneSettings) -> Examples:
    """Return the texts to fit a map to; none for a classifier, or if they are too few."""
    wanted = isinstance(given.model, BertModel) and settings.mapping and len(rest) >= MAP_NEEDS
    return rest.chosen(range(min(len(rest), MAP_TAKES) if wanted else 0))


def prune_all(job: PruneJob, targets: dict[Path, Target], place: Path, progress: bool) -> list[dict[str, Any]]:
    """Prune to each target, unless its folder is finished, and return the reports.

    Raises:
        ValueError: a target cannot be met, which is found before any work.
    """
    settings = {folder: job.determining(target) for folder, target in targets.items()}
    reports = {folder: finished_report(folder, settings[folder]) for folder in targets}

    # Targets that cannot be met are refused before the search for the first one.
    fresh = not (place / SETTINGS_FILE).exists()
    for folder, target in targets.items():
        if target.is_size:  # the bytes are counted, which raises if none are left
            spare_bytes(job.given.model, target, job.given.facts["dense_bytes"], map_bytes(job.map))
        elif fresh and reports[folder] is None and target.is_timed and not target.is_met_by_all:
            job.search(target=target, by="macs", shared=None, state=None, progress=None).check_reachable()

    # Likewise for too few minutes.
    if fresh and job.distillation and not all(reports.values()):
        with Progress(None, "", what="prune to", shown=progress) as bar:
            bar.stage("trial steps")
            job.distillation.check_time()

    # Finished folders are kept, so that a call after a crash does only the rest.
    state = State(place, job.shared)
    for folder, target in targets.items():
        if report := reports[folder]:
            report["lost"] |= job.limit(report["lost"])  # which may be another now
            if progress:
                print(f"{folder} is done already")
        else:
            reports[folder] = job.prune(target, folder, settings[folder], state, progress)
    return [report for report in reports.values() if report]


def timing_backend(settings: PruneSettings) -> str:
    """Return the backend that models are timed with: on a GPU graphs, since launches take a fixed time otherwise."""
    if settings.backend is not None:
        return settings.backend
    if parse_compute_dtype(settings.dtype) == torch.int8:
        return "auto"
    return GRAPHS if settings.device.startswith("cuda") else PLAIN


def as_timed(model: Any, dtype: ComputeDtype, backend: str) -> Any:
    """Return the model to time: itself if it is plain in its own dtype, else from `optimize_for_inference`."""
    if backend == PLAIN and dtype == model.dtype:
        return model.eval()
    return optimize_for_inference(model, dtype=dtype, backend=backend)


def warn_of_few_texts(tokens: int, texts: int, inputs: int) -> None:
    """Warn before the work if the texts have too few tokens for the widest matrix that is fitted, by its inputs."""
    wanted = FEWEST_TOKENS_OF_INPUT * inputs
    if tokens < wanted:
        warnings.warn(
            f"the {texts} texts to fit to have {tokens:,} tokens, and matrices up to"
            f" {inputs:,} inputs. With so few, results on other texts become worse: give"
            f" {wanted:,} tokens or more, such as {math.ceil(wanted * texts / tokens):,} texts",
            stacklevel=2,
        )


def warn_of_long_texts(fitted: float, judged: float) -> None:
    """Warn before the work if the texts to judge by have many more tokens, in the mean, than those to fit to."""
    if judged > LONGER * fitted:
        warnings.warn(
            f"the texts to judge by have {judged:.0f} tokens in the mean, those to fit to {fitted:.0f}. The pruned"
            " model may lose more on longer texts than it was fitted to: add texts of that length to --texts",
            stacklevel=2,
        )


def read_targets(texts: Sequence[str], of_size: bool, folder: Path) -> dict[Path, Target]:
    """Return the folder of each target: the given one or, for several targets, folders in it, such as FOLDER/2x.

    Raises:
        ValueError: a target is not valid, or two have one folder.
    """
    if not texts:
        raise ValueError("there is no target: give one such as 2x, 40%, 15ms or 30MB")
    found = [Target.parse(text, of_size) for text in texts]
    folders = [folder / target.text.replace(" ", "") for target in found] if found[1:] else [folder]
    if len(set(folders)) < len(folders):
        raise ValueError(f"a target is given twice: {', '.join(texts)}")
    return dict(zip(folders, found, strict=True))


def finished_report(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """Return the report in a folder that was written with the same settings; None if the folder is empty.

    Raises:
        FileExistsError: it holds something else.
    """
    if not folder.exists() or not any(folder.iterdir()):
        return None
    path = folder / REPORT
    found: dict[str, Any] = read_json_object(path) if path.exists() else {}
    if found.get("settings") != settings:
        raise FileExistsError(f"{folder} is there already: name another folder")
    return found
